"""Folders of small models with quantised weights: packed here, by each format's definition, from random codes.

test_formats.py shows with files of the formats' own libraries that such parts are read as these do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.bits import FP4
from tests import families
from tests.model.test_loading_hf import edit_config, edit_weights

GROUP = 16
LINEAR = re.compile(r".*(_proj|\.w[123]|\.dense\w*|\.fc\d)\.weight")
Parts = dict[str, Tensor]
Packer = Callable[[tuple[int, int], torch.Generator], tuple[Parts, Tensor]]
"""Makes the parts of a random weight [R, C], by the endings of their names, and the weight itself in float64."""


def pack(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes of 4 (or 8) bits [..., n] as words [..., n / 8] (or n / 4)."""
    words = (codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_groups(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, C], zero points and scales [R, C / GROUP]."""
    rows, cols = shape
    codes = torch.randint(16, shape, generator=generator)
    zeros = torch.randint(1, 16, (rows, cols // GROUP), generator=generator)
    scales = (torch.rand(rows, cols // GROUP, generator=generator) * 0.05 + 0.01).half()
    return codes, zeros, scales


def affine(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).double() * scales.double()[:, groups]


def gptq(shape: tuple[int, int], generator: torch.Generator, act_order: bool = False) -> tuple[Parts, Tensor]:
    codes, zeros, scales = random_groups(shape, generator)
    groups = torch.arange(shape[1]) // GROUP
    if act_order:
        groups = groups[torch.randperm(shape[1], generator=generator)]
    parts = {".qweight": pack(codes).T, ".qzeros": pack((zeros - 1).T), ".scales": scales.T, ".g_idx": groups.int()}
    return parts, affine(codes, zeros, scales, groups)


def gptq_act_order(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    return gptq(shape, generator, act_order=True)


def awq(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, zeros, scales = random_groups(shape, generator)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    words, zero_words = (pack(each.T.unflatten(1, (-1, 8))[..., order].flatten(1)) for each in (codes, zeros))
    parts = {".qweight": words, ".qzeros": zero_words, ".scales": scales.T}
    return parts, affine(codes, zeros, scales, torch.arange(shape[1]) // GROUP)


def int4(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, zeros, scales = random_groups(shape, generator)
    parts = {".weight_packed": pack(codes), ".weight_zero_point": pack(zeros.T).T, ".weight_scale": scales}
    parts[".weight_shape"] = torch.tensor(shape)
    return parts, affine(codes, zeros, scales, torch.arange(shape[1]) // GROUP)


def int8(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scales = (torch.rand(shape[0], 1, generator=generator) * 0.005 + 0.001).bfloat16()
    return {".weight": codes, ".weight_scale": scales}, codes.double() * scales.double()


def of_rows(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits [R, C], from -128 on, and a scale per row [R, 1]."""
    codes = torch.randint(-128, 128, shape, generator=generator)
    return codes, (torch.rand(shape[0], 1, generator=generator) * 0.005 + 0.001).half()


def int8_packed(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scales = of_rows(shape, generator)
    parts = {".weight_packed": pack(codes + 128, 8), ".weight_scale": scales, ".weight_shape": torch.tensor(shape)}
    return parts, codes.double() * scales.double()


def gptq_8(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scales = of_rows(shape, generator)
    zeros = torch.full((1, shape[0]), 127)
    parts = {".qweight": pack(codes + 128, 8).T, ".qzeros": pack(zeros, 8), ".scales": scales.T}
    return parts, codes.double() * scales.double()


def in_8_bits(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def fp8_rows(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scales = in_8_bits(shape, generator), torch.rand(shape[0], 1, generator=generator) * 0.5 + 0.1
    return {".weight": codes, ".weight_scale": scales}, codes.double() * scales.double()


def fp8_tensor(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, scale = in_8_bits(shape, generator), torch.rand((), generator=generator) + 0.1
    return {".weight": codes, ".weight_scale": scale, ".input_scale": scale + 1}, codes.double() * scale.double()


def fp8_blocks(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes, size = in_8_bits(shape, generator), 16
    scales = torch.rand(-(-shape[0] // size), -(-shape[1] // size), generator=generator) * 0.5 + 0.1
    wide = scales.double().repeat_interleave(size, 0)[: shape[0]].repeat_interleave(size, 1)[:, : shape[1]]
    return {".weight": codes, ".weight_scale_inv": scales}, codes.double() * wide


def nvfp4(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes = torch.randint(16, shape, generator=generator)
    scales = (torch.rand(shape[0], shape[1] // 16, generator=generator) * 4 + 1).to(torch.float8_e4m3fn)
    of_tensor = torch.rand((), generator=generator) * 0.05 + 0.01
    parts = {".weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), ".weight_scale": scales}
    wide = (scales.float() * of_tensor).double().repeat_interleave(16, 1)
    return parts | {".weight_scale_2": of_tensor}, torch.tensor(FP4).double()[codes] * wide


def nf4(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    size = shape[0] * shape[1]
    codes, table = torch.randint(16, (size,), generator=generator), torch.linspace(-1, 1, 16)
    scales = torch.rand(-(-size // 64), generator=generator) + 0.1
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(shape)}
    parts = {
        ".weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        ".weight.absmax": scales,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8),
    }
    weight = table.double()[codes] * scales.double().repeat_interleave(64)[:size]
    return parts, weight.view(shape)


def bnb_int8(shape: tuple[int, int], generator: torch.Generator) -> tuple[Parts, Tensor]:
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scales = torch.rand(shape[0], generator=generator) + 0.1
    parts = {".weight": codes, ".SCB": scales, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, (codes * scales[:, None]).double() / 127


IN_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}
GROUPS = {"group_0": {"weights": IN_GROUPS, "targets": ["Linear"]}}
ROWWISE = {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}}
FORMS: dict[str, tuple[Packer, dict[str, Any], str]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, "gptq, 4 bits"),
    "gptq_act_order": (
        gptq_act_order,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        "gptq, 4 bits",
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, "awq, 4 bits"),
    "int4": (int4, {"quant_method": "compressed-tensors", "config_groups": GROUPS}, "compressed-tensors, 4 bits"),
    "int8": (int8, {"quant_method": "compressed-tensors", "config_groups": ROWWISE}, "compressed-tensors, 8 bits"),
    "int8_packed": (
        int8_packed,
        {"quant_method": "compressed-tensors", "config_groups": ROWWISE},
        "compressed-tensors, 8 bits",
    ),
    "gptq_8": (gptq_8, {"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq, 8 bits"),
    "fp8_rows": (
        fp8_rows,
        {"quant_method": "compressed-tensors", "config_groups": ROWWISE},
        "compressed-tensors, 8 bits",
    ),
    "fp8_blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}, "fp8, 8 bits"),
    "modelopt_fp8": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt, 8 bits"),
    "modelopt_nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, 4 bits"),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "bnb_int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
}
"""By name: how the parts are made, the config's settings, and what a report says."""


def save(folder: Path, form: str, family: str = "llama", **sizes: Any) -> dict[str, Tensor]:
    """Save a model with quantised linear layers; returns all of its tensors in float64, by their names in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    families.build(
        family, dtype=torch.float32, **({"hidden_size": 64, "intermediate_size": 96} | sizes)
    ).save_pretrained(folder)
    packer, settings, _ = FORMS[form]
    expected: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def change(weights: dict[str, Tensor]) -> None:
        for name in sorted(weights):
            if LINEAR.fullmatch(name) and weights[name].ndim == 2:
                owner, shape = name.removesuffix(".weight"), tuple(weights.pop(name).shape)
                parts, expected[name] = packer(shape, generator)  # type: ignore[arg-type]
                weights.update({owner + ending: part.contiguous() for ending, part in parts.items()})
            else:
                expected[name] = weights[name].double()

    edit_weights(folder, change)
    edit_config(folder, quantization_config=settings)
    return expected


def save_plain(folder: Path, expected: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """The same model as `save`, as transformers reads it: its tensors rounded once, and no quantisation."""

    def change(weights: dict[str, Tensor]) -> None:
        weights.clear()
        weights.update({name: tensor.to(dtype) for name, tensor in expected.items()})

    edit_weights(folder, change)
    edit_config(folder, quantization_config=None)
