"""model=hf with quantised checkpoints: what is loaded is the dequantised model, on one rank and on several."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runahead import Model, ModelOptions
from runahead.config import DType
from runahead.model.loading.memory import Footprint
from tests.conftest import RankPools
from tests.families import prompt
from tests.model.quantised import checkpoints
from tests.model.test_loading_hf import edit_weights, load_hf, refusal
from tests.model.test_loading_memory import loaded_footprint
from tests.ranks import share_tasks
from tests.ranks.tensor_tasks import SIZES

FAMILIES = ["llama", "mixtral", "phi3"]
"""Plain; experts that are stored one by one and fused as they load; fused projections."""


def plain(folder: Path, expected: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of the dequantised weights."""
    copy = folder.with_name(f"{folder.name} plain")
    shutil.copytree(folder, copy)
    checkpoints.save_plain(copy, expected, dtype)
    return AutoModelForCausalLM.from_pretrained(copy, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", checkpoints.FORMS)
def test_weights_are_dequantised_and_rounded_once(form: str, family: str, tmp_path: Path) -> None:
    expected = checkpoints.save(tmp_path / "m", form, family)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_hf(tmp_path / "m", dtype=DType[str(dtype).removeprefix("torch.")])
        assert loaded.stored_as == checkpoints.FORMS[form][2] and not loaded.is_mapped
        if dtype == torch.float32:
            reference = plain(tmp_path / "m", expected).state_dict()
        for name, weight in loaded.module.state_dict().items():
            if form in ("bnb_int8", "modelopt_nvfp4"):  # which round to float32 in between
                torch.testing.assert_close(weight, reference[name].to(dtype), rtol=2**-7, atol=0)
            else:
                assert torch.equal(weight, reference[name].to(dtype)), name


def test_what_is_left_of_a_config_says_nothing_of_quantisation(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "gptq")
    loaded = load_hf(tmp_path)
    assert not hasattr(loaded.module.config, "quantization_config")
    assert not hasattr(loaded.module, "hf_quantizer")


def test_fingerprint_is_of_what_was_loaded(tmp_path: Path) -> None:
    """The same as of the dequantised model in a plain folder."""
    expected = checkpoints.save(tmp_path / "m", "int4")
    plain(tmp_path / "m", expected)
    paths = tmp_path / "m", tmp_path / "m plain"
    first, second = (Model.load(ModelOptions(name="hf", path=str(path)), torch.device("cpu")) for path in paths)
    assert first.fingerprint == second.fingerprint
    assert (first.stored_as, second.stored_as) == ("compressed-tensors, 4 bits, dequantised to float32", "")


def test_biases_of_zeros_without_a_place_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ stores a bias with each weight, also of families that have none."""
    expected = checkpoints.save(tmp_path, "gptq")
    name = "model.layers.0.mlp.up_proj"

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{name}.bias"] = torch.zeros(96)

    edit_weights(tmp_path, change)
    assert torch.equal(load_hf(tmp_path).module.state_dict()[f"{name}.weight"], expected[f"{name}.weight"].float())
    edit_weights(tmp_path, lambda weights: weights[f"{name}.bias"].fill_(0.5))
    assert f"no place for 1 of the stored tensors, such as {name}.bias" in refusal(lambda: load_hf(tmp_path))


def test_weights_count_as_copied_and_none_as_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = checkpoints.save(tmp_path, "int4", tie_word_embeddings=False)
    largest = 4 * (96 * 64 // 2 + 96 * 64 // GROUP * 2 + 96 * 64 // GROUP // 2 + 2 * 8)
    found = loaded_footprint(monkeypatch, tmp_path)
    assert found == Footprint(copied=sum(each.numel() for each in expected.values()) * 4, whole=found.whole)
    assert 0 < found.whole <= largest


GROUP = checkpoints.GROUP


@pytest.mark.parametrize("form", checkpoints.FORMS)
def test_a_missing_part_is_told_before_weights_are_read(form: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, form)
    parts, _ = checkpoints.FORMS[form][0]((64, 64), torch.Generator())
    scale = next(each for each in parts if each.endswith(("scales", "_scale", "_scale_inv", ".absmax", ".SCB")))
    name = f"model.layers.1.mlp.down_proj{scale}"
    edit_weights(tmp_path, lambda weights: weights.pop(name))
    message = refusal(lambda: load_hf(tmp_path))
    assert "model.layers.1.mlp.down_proj" in message and " without " in message


def test_a_truncated_shard_is_told(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is not a complete safetensors file" in refusal(lambda: load_hf(tmp_path))


# ---------------------------------------------------------------- on several ranks


@pytest.mark.parametrize("form", checkpoints.FORMS)
def test_shares_are_those_of_the_whole_model(form: str, rank_pools: RankPools, tmp_path: Path) -> None:
    options = []
    for family in FAMILIES:
        checkpoints.save(tmp_path / family, form, family, **SIZES)
        options.append(ModelOptions(name="hf", path=str(tmp_path / family)))
    for found in rank_pools.run(2, share_tasks.differences, options):
        assert found == [[], [], []]


@pytest.mark.parametrize("form", ["gptq_act_order", "awq", "fp8_blocks", "nf4"])
def test_tokens_of_shares_are_those_of_transformers(form: str, rank_pools: RankPools, tmp_path: Path) -> None:
    expected = checkpoints.save(tmp_path / "m", form, **SIZES)
    module = plain(tmp_path / "m", expected)
    ids = torch.tensor([prompt(30)])
    tokens = module.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    options = ModelOptions(name="hf", path=str(tmp_path / "m"))
    for found, _ in rank_pools.run(2, share_tasks.tokens_of_shares, options, prompt(30)):
        assert found == tokens.tolist()
