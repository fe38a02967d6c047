"""Checkpoints in 8 bits with `model.weights=int8`: layers have the codes and scales of the files."""

# Legend: R rows (outputs) and C columns (inputs) of a weight.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, even
from runahead.config import DType
from runahead.kernels import operators
from runahead.model.layers.int8 import EncodedWeight, encode_linears, encoded_layers, unrounded
from runahead.model.loading import kernels
from runahead.model.loading.quantised.in_8_bits import CodedWeight, fits
from runahead.model.loading.quantised.packed import PackedWeight
from runahead.model.loading.sharing import bytes_of
from tests.conftest import RankPools
from tests.families import prompt
from tests.model.quantised import checkpoints
from tests.model.quantised.test_checkpoints import plain
from tests.model.quantised.test_formats import form_of, parts_of, read
from tests.model.test_int8 import load_kernels
from tests.model.test_loading_hf import edit_config, edit_weights, load_hf, refusal
from tests.model.test_loading_memory import loaded_footprint
from tests.needs import missing

TAKEN = ["int8", "int8_packed", "gptq_8", "bnb_int8"]

OTHERS = [form for form in checkpoints.FORMS if form not in TAKEN]

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if kernels.unsupported() or kernels.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    load_kernels()


def codes_of(form: str, tensors: dict[str, Tensor], owner: str) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R] in a file, by the format's definition."""
    if form == "bnb_int8":
        return tensors[f"{owner}.weight"], tensors[f"{owner}.SCB"] * torch.tensor(1 / 127)
    if form == "gptq_8":
        words, scales = tensors[f"{owner}.qweight"].T, tensors[f"{owner}.scales"][0]
    else:
        words, scales = tensors.get(f"{owner}.weight_packed"), tensors[f"{owner}.weight_scale"][:, 0]
    if words is None:
        return tensors[f"{owner}.weight"], scales.float()
    codes = torch.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], -1).flatten(1) - 128
    return codes.to(torch.int8), scales.float()


def laid_out(encoded: EncodedWeight, num_cols: int) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R] of a layer, number by number."""
    codes = encoded.codes.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    return codes[: len(encoded.scales_O), :num_cols], encoded.scales_O


@pytest.mark.parametrize("reference", ["ct_int8_channel", "bnb_int8"])
def test_codes_of_the_formats_libraries_stay_as_they_are(reference: str, tmp_path: Path) -> None:
    tensors, expected = parts_of(reference)
    weight = read(form_of(reference), tensors, tmp_path, torch.float32)["w.weight"]
    assert fits(weight)
    decoded = CodedWeight.of(weight)[...]
    codes, scales = laid_out(decoded.encoded, expected.shape[1])
    known, known_scales = codes_of("bnb_int8" if reference == "bnb_int8" else "int8", tensors, "w")
    assert torch.equal(codes, known) and torch.equal(scales, known_scales)
    torch.testing.assert_close(decoded + 0, weight[...], rtol=2e-7, atol=0)  # bitsandbytes multiplies in another order


@pytest.mark.parametrize("reference", ["ct_int8_zeros", "ct_fp8_channel", "ct_int4", "gptq_8", "bnb_nf4"])
def test_others_are_not_taken_as_they_are(reference: str, tmp_path: Path) -> None:
    """Weights with zero points, floating-point codes, fewer bits, groups."""
    tensors, _ = parts_of(reference)
    assert not fits(read(form_of(reference), tensors, tmp_path)["w.weight"])


def load_int8(folder: Path, **options: Any) -> Any:
    return load_hf(folder, weights="int8", **{"dtype": DType.float32} | options)


@pytest.mark.parametrize("form", TAKEN)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_layers_have_the_codes_of_the_file(
    form: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a way through numbers, where a layer has the weight as it is stored; experts are joined as they load."""
    checkpoints.save(tmp_path, form, family, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    decoded = set()
    decode = PackedWeight._decode

    def noted(self: PackedWeight, *given: Any) -> None:
        decoded.add(self.shape)
        decode(self, *given)

    monkeypatch.setattr(PackedWeight, "_decode", noted)
    loaded = load_int8(tmp_path)
    layers = {name: each for name, each in loaded.module.named_modules() if each in encoded_layers(loaded.module)}
    assert loaded.num_coded == len(layers) - 1  # but for the head
    assert bool(decoded) == (family == "qwen3_moe")
    for name, layer in layers.items():
        if name != "lm_head":
            known = codes_of(form, tensors, name)
            assert all(map(torch.equal, laid_out(layer.encoded, layer.in_features), known)), name


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.roll(1, 0), lambda x: x.roll(1, 1)])
def test_other_codes_are_told_apart(change: Callable[[Tensor], Tensor]) -> None:
    codes = torch.randint(-100, 100, (70, 90), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    encoded = EncodedWeight.of_codes(change(codes), torch.ones(70))
    assert not torch.equal(laid_out(encoded, 90)[0], codes)


def test_products_of_the_least_code_are_exact() -> None:
    """-128 has no opposite in 8 bits, and rounding to codes never makes it."""
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randint(-127, 128, (33, 320), generator=generator).float()
    x_RI[:, ::64] = 127
    codes_OI = torch.randint(-128, 128, (65, 320), generator=generator, dtype=torch.int8)
    codes_OI[:, :40] = codes_OI[3] = -128
    encoded = EncodedWeight.of_codes(codes_OI, torch.ones(65))
    found = operators.linear_int8(x_RI, encoded.codes, encoded.sums, encoded.scales_O, None)
    assert torch.equal(found.double(), x_RI.double() @ codes_OI.double().T)


@pytest.mark.parametrize("form", TAKEN)
def test_logits_are_those_of_transformers_on_the_dequantised_model(form: str, tmp_path: Path) -> None:
    """But for what the head is rounded by, which is given to both; activations are not rounded here."""
    expected = checkpoints.save(tmp_path / "m", form, tie_word_embeddings=False)
    reference, module = plain(tmp_path / "m", expected), load_int8(tmp_path / "m", attention="eager").module
    reference.lm_head.weight = torch.nn.Parameter(module.lm_head.weight + 0)
    ids = torch.tensor([prompt(30)])
    with torch.inference_mode(), unrounded(module):
        torch.testing.assert_close(module(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", TAKEN)
def test_reports_say_whose_codes_they_are(form: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, form)
    model = Model.load(
        ModelOptions(name="hf", path=str(tmp_path), weights="int8", dtype="float32"), torch.device("cpu")
    )
    layers = len(encoded_layers(model.module))
    assert model.stored_as.startswith(f"{checkpoints.FORMS[form][2]}, as int8 (")
    assert model.stored_as.endswith(f"% of the parameters); codes of {layers - 1} of {layers} layers as stored")


@pytest.mark.parametrize("form", OTHERS)
def test_others_are_rounded_from_their_numbers(form: str, tmp_path: Path) -> None:
    expected = checkpoints.save(tmp_path / "m", form)
    loaded, reference = load_int8(tmp_path / "m"), plain(tmp_path / "m", expected)
    encode_linears(reference)
    assert loaded.num_coded == 0
    for ours, known in zip(encoded_layers(loaded.module), encoded_layers(reference), strict=True):
        torch.testing.assert_close(ours.scales, known.scales, rtol=1e-6, atol=0)
        assert (ours.codes.int() - known.codes.int()).abs().max() <= (1 if form == "modelopt_nvfp4" else 0)


def test_a_head_that_is_tied_is_rounded_anew(tmp_path: Path) -> None:
    """Its embeddings are read as numbers."""
    checkpoints.save(tmp_path, "int8", tie_word_embeddings=True)

    def add_head(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = torch.ones_like(weights["model.embed_tokens.weight"]).to(torch.int8)
        weights["lm_head.weight_scale"] = torch.ones(len(weights["lm_head.weight"]), 1)

    edit_weights(tmp_path, add_head)
    loaded = load_int8(tmp_path)
    head = loaded.module.lm_head
    assert head in encoded_layers(loaded.module) and loaded.num_coded == len(encoded_layers(loaded.module)) - 1
    assert loaded.module.get_input_embeddings().weight.is_floating_point()


def test_the_room_that_is_asked_for_has_no_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path, "int8", tie_word_embeddings=False)
    found = loaded_footprint(monkeypatch, tmp_path, weights="int8", dtype="float32")
    module = load_int8(tmp_path).module
    head = module.lm_head
    of_head = 2 * sum(each.nbytes for each in (head.codes, head.sums, head.scales))
    held = bytes_of(module) - found.mapped
    assert found.copied >= held and found.copied - held <= 4 * head.weight.numel() + of_head
    numbers = loaded_footprint(monkeypatch, tmp_path, dtype="float32")
    assert numbers.copied > found.copied


def test_keeping_dequantised_weights_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    checkpoints.save(tmp_path / "m", "gptq_8")
    with pytest.warns(UserWarning, match="keep_dequantized has no effect .* as they are stored"):
        assert load_int8(tmp_path / "m", keep_dequantized=True).num_coded
    assert not (tmp_path / "cache" / "dequantized").exists()


@pytest.mark.parametrize("form", TAKEN)
def test_damage_is_told(form: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, form)
    parts, _ = checkpoints.FORMS[form][0]((64, 64), torch.Generator())
    scale = next(each for each in parts if each.endswith(("scales", "_scale", ".SCB")))
    edit_weights(tmp_path, lambda weights: weights.update({UP + scale: weights[UP + scale].flatten()[:-1].clone()}))
    assert f"{UP}" in refusal(lambda: load_int8(tmp_path))


def test_groups_that_there_are_not_are_told(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "gptq_8")
    edit_weights(tmp_path, lambda weights: weights.update({f"{UP}.g_idx": torch.full((64,), 3, dtype=torch.int32)}))
    assert "its g_idx names group 3, and it has 1 groups" in refusal(lambda: load_int8(tmp_path))


def test_zero_points_are_read_of_each_weight(tmp_path: Path) -> None:
    """A weight with others is decoded, and rounded anew."""
    checkpoints.save(tmp_path, "gptq_8")
    edit_config(tmp_path, quantization_config=checkpoints.FORMS["gptq_8"][1] | {"checkpoint_format": "gptq_v2"})
    assert load_int8(tmp_path).num_coded == 0


def answers(ranks: Ranks, library: Path, options: ModelOptions, ids: list[int]) -> tuple[list[int], int]:
    operators.load(library)
    model = Model.load(options, ranks.device)
    batch = Engine(model, ranks, partition=even).generate([ids], GenerationOptions(max_new_tokens=6, ignore_eos=True))
    return batch.generations[0].new_token_ids, len(encoded_layers(model.module))


@pytest.mark.parametrize("form", TAKEN)
def test_two_ranks_answer_as_one_does(form: str, rank_pools: RankPools, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, form)
    options = ModelOptions(name="hf", path=str(tmp_path), weights="int8", dtype="float32")
    [alone] = rank_pools.run(1, answers, load_kernels(), options, prompt(60))
    for found in rank_pools.run(2, answers, load_kernels(), options, prompt(60)):
        assert found == alone
