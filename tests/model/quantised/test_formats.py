"""Formats of quantised weights: every number is the one that the format's own library makes of the stored parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runahead.model.loading.quantised import FORMATS, Form, bits, packed
from runahead.model.loading.quantised import awq as awq_format
from runahead.model.loading.quantised.packed import PackedWeight

FOLDER = Path(__file__).parent
NAMES = {"gptq": "gptq", "awq": "awq", "ct": "compressed-tensors", "bnb": "bitsandbytes"}
REFERENCES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def form_of(reference: str) -> Form:
    with safe_open(FOLDER / f"{reference}.safetensors", framework="pt") as file:
        return Form(name=NAMES[reference.split("_")[0]], settings=json.loads(file.metadata()["settings"]))


def read(form: Form, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The weights of tensors in a file."""
    path = folder / "parts.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    file = safe_open(path, framework="pt", backend="pread")
    return form.weights(form.found({name: file.get_slice(name) for name in file.keys()}), dtype)  # noqa: SIM118


def parts_of(reference: str) -> tuple[dict[str, Tensor], Tensor]:
    tensors = load_file(FOLDER / f"{reference}.safetensors")
    return tensors, tensors.pop("expected")


def test_references_of_all_formats_are_there() -> None:
    assert {NAMES[each.split("_")[0]] for each in REFERENCES} == set(FORMATS) - {"fp8", "mxfp8", "mxfp4", "modelopt"}
    assert len(REFERENCES) == 20


@pytest.mark.parametrize("reference", REFERENCES)
def test_numbers_are_those_of_the_formats_library(reference: str, tmp_path: Path) -> None:
    tensors, expected = parts_of(reference)
    found = read(form_of(reference), tensors, tmp_path, expected.dtype)
    assert set(found) == {"w.weight"} and found["w.weight"].get_shape() == list(expected.shape)
    assert torch.equal(found["w.weight"][...], expected)


@pytest.mark.parametrize("reference", REFERENCES)
def test_blocks_of_rows_make_no_difference(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, expected = parts_of(reference)
    monkeypatch.setattr(packed, "BLOCK", 100)
    assert torch.equal(read(form_of(reference), tensors, tmp_path, expected.dtype)["w.weight"][:], expected)


@pytest.mark.parametrize("reference", REFERENCES)
def test_parts_are_those_of_the_whole(reference: str, tmp_path: Path) -> None:
    """All ranges of a few ends, many of which cut a group, a word or a byte."""
    tensors, expected = parts_of(reference)
    weight = read(form_of(reference), tensors, tmp_path, expected.dtype)["w.weight"]

    def pairs(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: (min(ends), max(ends)))

    @settings(max_examples=40, deadline=None)
    @given(pairs(expected.shape[0]), pairs(expected.shape[1]))
    def check(rows: tuple[int, int], cols: tuple[int, int]) -> None:
        index = slice(*rows), slice(*cols)
        part = weight[index]
        assert torch.equal(part, expected[index]) and part.is_contiguous()

    check()


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def one_more(words: Tensor) -> Tensor:
    """Each of the codes of 4 bits larger by one."""
    nibbles = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)])
    return sum(((each + 1) & 15) << shift for each, shift in zip(nibbles, range(0, 32, 4), strict=True))  # type: ignore[return-value]


WRONG = {
    "gptq: scales of the next group": ("gptq_4", changed("w.scales", lambda x: x.roll(1, 0))),
    "gptq: transposed groups": ("gptq_4", changed("w.scales", lambda x: x.T.reshape(x.shape))),
    "gptq: zero points off by one": ("gptq_4", changed("w.qzeros", one_more)),
    "gptq: order of activations ignored": ("gptq_4_act_order", lambda tensors: tensors.pop("w.g_idx")),
    "awq: scales of the next group": ("awq", changed("w.scales", lambda x: x.roll(1, 0))),
    "awq: zero points off by one": ("awq", changed("w.qzeros", one_more)),
    "awq: transposed groups": ("awq", changed("w.scales", lambda x: x.T.reshape(x.shape))),
    "int4: scales of the next group": ("ct_int4_zeros", changed("w.weight_scale", lambda x: x.roll(1, 1))),
    "int4: transposed groups": ("ct_int4_zeros", changed("w.weight_scale", lambda x: x.T.reshape(x.shape))),
    "int4: zero points off by one": ("ct_int4_zeros", changed("w.weight_zero_point", one_more)),
    "int8: zero points off by one": ("ct_int8_zeros", changed("w.weight_zero_point", lambda x: x + 1)),
    "fp8: scales of the next row": ("ct_fp8_channel", changed("w.weight_scale", lambda x: x.roll(1, 0))),
    "fp8: scales of the next block": ("ct_fp8_block", changed("w.weight_scale", lambda x: x.roll(1, 1))),
    "nvfp4: scales of the next group": ("ct_nvfp4", changed("w.weight_scale", lambda x: x.roll(1, 1))),
    "nf4: scales of the next block": ("bnb_nf4", changed("w.weight.absmax", lambda x: x.roll(1))),
    "nf4: scales of the next scales": ("bnb_nf4_nested", changed("w.weight.nested_absmax", lambda x: x * 1.1)),
    "bitsandbytes int8: scales of the next row": ("bnb_int8", changed("w.SCB", lambda x: x.roll(1))),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_are_read_wrongly_give_other_numbers(case: str, tmp_path: Path) -> None:
    reference, damage = WRONG[case]
    tensors, expected = parts_of(reference)
    damage(tensors)
    assert not torch.equal(read(form_of(reference), tensors, tmp_path, expected.dtype)["w.weight"][...], expected)


def test_awqs_order_of_codes_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, expected = parts_of("awq")
    monkeypatch.setattr(awq_format, "ORDER", tuple(range(8)))
    assert not torch.equal(read(form_of("awq"), tensors, tmp_path, expected.dtype)["w.weight"][...], expected)


def test_zero_points_of_the_second_gptq_are_stored_as_they_are(tmp_path: Path) -> None:
    tensors, expected = parts_of("gptq_4")
    tensors["w.qzeros"] = one_more(tensors["w.qzeros"])
    form = form_of("gptq_4")
    second = Form(name="gptq", settings={**form.settings, "checkpoint_format": "gptq_v2"})
    assert torch.equal(read(second, tensors, tmp_path, expected.dtype)["w.weight"][...], expected)


def test_order_of_activations_in_compressed_tensors(tmp_path: Path) -> None:
    """Columns whose groups are shuffled: each has the scale and zero point of its group."""
    tensors, expected = parts_of("ct_int4_zeros")
    order = torch.randperm(expected.shape[1], generator=torch.Generator().manual_seed(0))
    codes = bits.unpack(tensors["w.weight_packed"], 4)
    words = codes[:, order].int().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    tensors["w.weight_packed"] = words.sum(2).int()
    tensors["w.weight_g_idx"] = (order // 16).int()
    weight = read(form_of("ct_int4_zeros"), tensors, tmp_path, expected.dtype)["w.weight"]
    assert torch.equal(weight[...], expected[:, order])
    assert torch.equal(weight[3:9, 5:40], expected[:, order][3:9, 5:40])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_codes_lie_one_after_another_from_the_lowest_bit_up(size: int) -> None:
    codes = torch.randint(2**size, (3, 96), generator=torch.Generator().manual_seed(size))
    words = torch.zeros(3, 96 * size // 32, dtype=torch.int64)
    for row, of_row in enumerate(codes.tolist()):
        number = sum(code << (place * size) for place, code in enumerate(of_row))
        for word in range(words.shape[1]):
            words[row, word] = (number >> (32 * word)) & 0xFFFFFFFF
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    assert torch.equal(bits.unpack(words, size).long(), codes)


# ---------------------------------------------------------------- formats that transformers reads


def fp8_weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).clamp(-3, 3).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "of_scales", "of_type"),
    [
        ((16, 32), (4, 4), torch.float32),
        ((16, 32), (1, 1), torch.float32),
        ((16, 32), (16, 1), torch.bfloat16),
        ((16, 64), (16, 2), torch.uint8),
        ((3, 16, 32), (3, 4, 4), torch.float32),
    ],
)
def test_fp8_is_that_of_transformers(
    shape: tuple[int, ...], of_scales: tuple[int, ...], of_type: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight, scale = fp8_weight(*shape), torch.rand(of_scales, generator=torch.Generator().manual_seed(2)) + 0.1
    scale = (scale * 20 + 110).to(of_type) if of_type is torch.uint8 else scale.to(of_type)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    form = Form(name="fp8", settings={})
    found = read(form, {"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path, dtype)["w.weight"]
    assert torch.equal(found[...], expected)
    assert torch.equal(found[..., 3:9, 5:31], expected[..., 3:9, 5:31])
    if len(shape) == 3:
        assert torch.equal(found[1:2, 2:7], expected[1:2, 2:7])


def test_last_blocks_of_fp8_may_be_smaller(tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj has 576 rows in blocks of 128, which transformers refuses."""
    weight, scale = fp8_weight(18, 20), torch.rand(5, 3)
    expected = weight.double() * scale.double().repeat_interleave(4, 0)[:18].repeat_interleave(8, 1)[:, :20]
    form = Form(name="fp8", settings={"weight_block_size": [4, 8]})
    found = read(form, {"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path)["w.weight"]
    assert torch.equal(found[...], expected.float())
    assert torch.equal(found[5:18, 9:20], expected.float()[5:18, 9:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_that_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (2, 6, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    stored = {"m.experts.down_proj_blocks": blocks, "m.experts.down_proj_scales": scales}
    found = read(Form(name="mxfp4", settings={}), stored, tmp_path, dtype)["m.experts.down_proj"]
    assert found.get_shape() == list(expected.shape)
    assert torch.equal(found[...], expected)
    assert torch.equal(found[1:2, 5:70, 1:4], expected[1:2, 5:70, 1:4])
    stored["m.experts.down_proj_scales"] = scales.roll(1, 2)
    wrong = read(Form(name="mxfp4", settings={}), stored, tmp_path, dtype)["m.experts.down_proj"]
    assert not torch.equal(wrong[...], expected)


# ---------------------------------------------------------------- ModelOpt's, by their definition


@pytest.mark.parametrize("shape", [(), (1,), (16,), (4, 1, 8, 1)])
def test_modelopts_fp8(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = fp8_weight(16, 32), torch.rand(shape) + 0.1
    stored = {"w.weight": weight, "w.weight_scale": scale, "w.input_scale": torch.ones(())}
    expected = weight.double() * (
        scale.reshape(4, 8).double().repeat_interleave(4, 0).repeat_interleave(4, 1)
        if len(shape) == 4
        else scale.double().reshape(-1, 1)
    )
    found = read(Form(name="modelopt", settings={}), stored, tmp_path)
    assert set(found) == {"w.weight"} and torch.equal(found["w.weight"][...], expected.float())


def test_modelopts_nvfp4(tmp_path: Path) -> None:
    """The same codes as compressed-tensors', whose scales are divided by what ModelOpt's are multiplied with."""
    tensors, expected = parts_of("ct_nvfp4")
    of_tensor = 1 / tensors["w.weight_global_scale"].reshape(())
    stored = {"w.weight": tensors["w.weight_packed"], "w.weight_scale": tensors["w.weight_scale"]}
    stored |= {"w.weight_scale_2": of_tensor, "w.input_scale": torch.ones(())}
    found = read(Form(name="modelopt", settings={}), stored, tmp_path, torch.float32)["w.weight"]
    torch.testing.assert_close(found[...], expected.float(), rtol=2**-8, atol=0)  # which is rounded to bfloat16


# ---------------------------------------------------------------- damaged


DAMAGED = [
    ("gptq_4", lambda t: t.pop("w.scales"), "is stored without w.scales"),
    ("gptq_4", lambda t: t.pop("w.qweight"), "w.g_idx is stored without w.qweight"),
    ("gptq_4", changed("w.scales", lambda x: x[:-1]), "w.qzeros has shape"),
    ("gptq_4", changed("w.qweight", lambda x: x[:-2]), "and a group of 16 columns needs [3, 32]"),
    ("gptq_4", changed("w.g_idx", lambda x: x[:-1]), "w.g_idx has shape [63]"),
    ("awq", lambda t: t.pop("w.qzeros"), "w.qweight is stored without w.qzeros"),
    ("awq", changed("w.scales", lambda x: x[:, :8]), "w.qweight has shape [64, 4], and w.scales needs [64, 1]"),
    ("awq", changed("w.qweight", lambda x: x[:30]), "and a group of 16 columns needs [2, 32]"),
    ("ct_int4", lambda t: t.pop("w.weight_scale"), "w.weight_packed is stored without w.weight_scale"),
    ("ct_int4", lambda t: t.pop("w.weight_shape"), "w.weight_packed is stored without w.weight_shape"),
    ("ct_int4", lambda t: t.pop("w.weight_packed"), "is stored without w.weight"),
    ("ct_int4", changed("w.weight_scale", lambda x: x[:, :3]), "w.weight_scale has shape [16, 3]"),
    ("ct_int4", changed("w.weight_scale", lambda x: x.T), "w.weight_scale has shape [4, 16]"),
    ("ct_int4", changed("w.weight_scale", lambda x: x.repeat(1, 2)), "w.weight_scale has shape [16, 8]"),
    ("ct_int4", changed("w.weight_packed", lambda x: x[:, 1:]), "w.weight_packed has shape [16, 7]"),
    ("ct_int4_zeros", changed("w.weight_zero_point", lambda x: x[:1]), "w.weight_zero_point has shape [1, 4]"),
    ("ct_int4_zeros", lambda t: t.pop("w.weight_zero_point"), "is stored without w.weight_zero_point"),
    ("ct_int8_zeros", lambda t: t.pop("w.weight_zero_point"), "is stored without w.weight_zero_point"),
    ("ct_int8_channel", lambda t: t.pop("w.weight_scale"), "w.weight is stored in 8 bits without its scale"),
    ("ct_fp8_tensor", lambda t: t.pop("w.weight_scale"), "w.weight is stored in 8 bits without its scale"),
    ("ct_fp8_channel", changed("w.weight_scale", lambda x: x[:9]), "w.weight_scale has shape [9, 1]"),
    ("ct_fp8_block", changed("w.weight_scale", lambda x: x[:, :2]), "w.weight_scale has shape [2, 2]"),
    ("bnb_nf4", lambda t: t.pop("w.weight.absmax"), "is stored without w.weight.absmax"),
    ("bnb_nf4", lambda t: t.pop("w.weight.quant_state.bitsandbytes__nf4"), "is stored without"),
    ("bnb_nf4", changed("w.weight.absmax", lambda x: x[1:]), "w.weight.absmax has shape [15]"),
    ("bnb_nf4", changed("w.weight", lambda x: x[1:]), "w.weight has shape [511, 1]"),
    ("bnb_nf4_nested", lambda t: t.pop("w.weight.nested_quant_map"), "without w.weight.nested_quant_map"),
    ("bnb_int8", lambda t: t.pop("w.SCB"), "w.weight is stored without w.quant_state or SCB"),
    ("bnb_int8", changed("w.SCB", lambda x: x[1:]), "w.SCB has shape [15]"),
]


@pytest.mark.parametrize(("reference", "damage", "words"), DAMAGED)
def test_missing_parts_and_wrong_sizes_are_named_from_the_headers(
    reference: str, damage: Callable[[dict[str, Tensor]], Any], words: str, tmp_path: Path
) -> None:
    tensors, _ = parts_of(reference)
    damage(tensors)
    with pytest.raises(ValueError) as caught:
        read(form_of(reference), tensors, tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_groups_that_are_not_there_are_told(tmp_path: Path) -> None:
    tensors, _ = parts_of("gptq_4_act_order")
    tensors["w.g_idx"][5] = 4
    weight = read(form_of("gptq_4_act_order"), tensors, tmp_path)["w.weight"]
    assert isinstance(weight, PackedWeight)
    with pytest.raises(ValueError, match="its g_idx names group 4, and it has 4 groups"):
        weight[...]


@pytest.mark.parametrize(
    ("form", "about", "words"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "laid out for a kernel (marlin)"),
        ("awq", {"version": "gemv", "bits": 4}, "version gemv with 4 bits"),
        ("awq", {"bits": 8}, "version gemm with 8 bits"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse (sparse-24-bitmask)"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"u": {}}}}, "are transformed"),
    ],
)
def test_variants_that_are_not_read_are_named(form: str, about: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read(Form(name=form, settings=about), {"w.weight": torch.ones(2, 2)}, tmp_path)
    assert words in str(caught.value)
