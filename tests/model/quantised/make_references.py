"""Makes the reference files beside it: weights quantised and dequantised by each format's own library.

Not run by tests, as the libraries are large. Beside the stored parts of `w` each file has `expected`, which the library
made of them, and the config's settings as JSON in its metadata. Made with auto-gptq 0.7.1, autoawq 0.2.9 (its modules
alone, as the packages do not import beside transformers 5), compressed-tensors 0.20.0 and bitsandbytes 0.50.2, all on a
CPU:

    python make_references.py <folder of auto_gptq's wheel> <folder of autoawq's source>
"""

from __future__ import annotations

import json
import sys
import types
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
ROWS, COLS, GROUP = 16, 64, 16


def write(name: str, parts: dict[str, Tensor], expected: Tensor, **settings: Any) -> None:
    tensors = {f"w{ending}": part.contiguous() for ending, part in parts.items()} | {"expected": expected.contiguous()}
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"settings": json.dumps(settings)})
    print(name, (HERE / f"{name}.safetensors").stat().st_size)


def affine(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points [R, G] of a weight whose column c is in group `groups[c]`; zeros from 1 up."""
    top, scales, zeros = 2**bits - 1, [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.min(1).values.clamp_max(-1e-3), part.max(1).values.clamp_min(1e-3)
        scales.append(((high - low) / top).half())
        zeros.append((-low / scales[-1].float()).round().clamp(1, top))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq(wheel: str) -> None:
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(wheel, *name.split(".")))]
        sys.modules[name] = package
    path = Path(wheel, "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    spec = util.spec_from_file_location("qlinear_cuda", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for bits, act_order in ((4, False), (4, True), (3, False), (8, False), (2, True)):
        rows = 32  # of which a packed row of zero points needs as many
        torch.manual_seed(bits)
        linear = nn.Linear(COLS, rows, bias=False).half()
        groups = torch.arange(COLS) // GROUP
        if act_order:
            groups = groups[torch.randperm(COLS)]
        scales, zeros = affine(linear.weight.float(), bits, groups)
        layer = module.QuantLinear(bits, GROUP, COLS, rows, bias=False, kernel_switch_threshold=0)
        layer.pack(linear, scales, zeros, groups.int())
        parts = {f".{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
        expected = layer(torch.eye(COLS).half()).T
        write(f"gptq_{bits}{'_act_order' if act_order else ''}", parts, expected, bits=bits, group_size=GROUP)


def awq(source: str) -> None:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(source, *name.split(".")))]
        sys.modules[name] = package
    sys.modules["awq.utils.utils"] = utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"
    module, packing = import_module("awq.modules.linear.gemm"), import_module("awq.utils.packing_utils")
    torch.manual_seed(0)
    linear = nn.Linear(COLS, 32, bias=False).half()
    scales, zeros = affine(linear.weight.float(), 4, torch.arange(COLS) // GROUP)
    layer = module.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    parts = {f".{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    expected = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).T
    write("awq", parts, expected, bits=4, group_size=GROUP, version="gemm")


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def make(name: str, layout: str, **about: Any) -> None:
        torch.manual_seed(len(name))
        weight = (torch.randn(ROWS, COLS) / 8).bfloat16()
        args = QuantizationArgs(**about)
        strategy = about["strategy"]
        if strategy == "block":
            height, width = about["block_structure"]
            blocks = weight.view(ROWS // height, height, COLS // width, width).transpose(1, 2).flatten(2)
        elif strategy in ("group", "tensor_group"):
            blocks = weight.unflatten(1, (-1, about["group_size"]))
        else:
            blocks = weight[:, None] if strategy == "channel" else weight.flatten()[None, None]
        state: dict[str, Tensor] = {"weight": weight}
        if layout == "nvfp4-pack-quantized":
            state["weight_global_scale"] = torch.tensor([448 * 6 / float(weight.abs().max())])
            scale = state["weight_global_scale"] * blocks.abs().amax(2).float() / 6
            state["weight_scale"] = scale.to(torch.float8_e4m3fn).to(torch.bfloat16)
        else:
            scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), args)
            shape = (1,) if strategy == "tensor" else tuple(scale.shape)
            state["weight_scale"] = scale.reshape(shape)
            if not about.get("symmetric", True):
                state["weight_zero_point"] = zero.reshape(shape)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        compressor = BaseCompressor.get_value_from_registry(layout)
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"]
        groups = {"group_0": {"weights": json.loads(args.model_dump_json()), "targets": ["Linear"]}}
        parts = {f".{part}": tensor for part, tensor in stored.items()}
        write(name, parts, expected, config_groups=groups, format=layout)

    grouped: dict[str, Any] = {"type": "int", "strategy": "group", "group_size": GROUP}
    make("ct_int4", "pack-quantized", num_bits=4, symmetric=True, **grouped)
    make("ct_int4_zeros", "pack-quantized", num_bits=4, symmetric=False, **grouped)
    make("ct_int3_zeros", "pack-quantized", num_bits=3, symmetric=False, **grouped)
    make("ct_int8_channel", "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)
    make("ct_int8_zeros", "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)
    make("ct_fp8_channel", "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
    make("ct_fp8_tensor", "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True)
    make("ct_fp8_block", "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 16])
    make("ct_nvfp4", "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)


def bitsandbytes() -> None:
    from bitsandbytes import functional

    for name, kind, nested, shape in (
        ("bnb_nf4", "nf4", False, (ROWS, COLS)),
        ("bnb_nf4_nested", "nf4", True, (ROWS, COLS)),
        ("bnb_fp4", "fp4", False, (ROWS, COLS)),
        ("bnb_nf4_uneven", "nf4", True, (24, 40)),
    ):
        torch.manual_seed(len(name))
        weight = (torch.randn(shape) / 8).half()
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        parts = {".weight": packed} | {f".weight.{part}": each for part, each in state.as_dict(packed=True).items()}
        write(name, parts, functional.dequantize_4bit(packed, state), load_in_4bit=True)
    torch.manual_seed(0)
    codes, scales, _ = functional.int8_vectorwise_quant((torch.randn(ROWS, COLS) / 8).half())
    expected = functional.int8_vectorwise_dequant(codes, scales)
    write("bnb_int8", {".weight": codes, ".SCB": scales.float()}, expected, load_in_8bit=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    gptq(sys.argv[1])
    awq(sys.argv[2])
    compressed_tensors()
    bitsandbytes()
