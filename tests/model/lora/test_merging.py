"""Adapters merged into weights. References: peft's own forward without merging, and its merge in float32."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from runahead.config import ModelOptions
from runahead.model.loading import checkpoint, load
from runahead.model.loading.memory import Footprint
from runahead.model.model import Model
from tests.conftest import RankPools
from tests.families import prompt
from tests.model.lora import rank_tasks as tasks
from tests.model.lora.made import adapt, base, edit_settings, edit_tensors, need_peft, options, peft_logits, peft_model
from tests.model.test_loading_gguf import write_gguf
from tests.model.test_loading_hf import CPU, edit_weights, load_hf
from tests.ranks.share_tasks import differences
from tests.ranks.tensor_tasks import SIZES

IDS = prompt(24)

CLOSE = 1e-5
"""Largest difference of logits, relative to the largest: sums of float32 in another order."""


@pytest.fixture(autouse=True)
def _peft() -> None:
    need_peft()


def logits(model: Path, *adapters: Path) -> Tensor:
    """Logits (S, V) of the loaded weights, by transformers' own attention."""
    module = load_hf(model, adapter=[str(each) for each in adapters]).module
    with torch.inference_mode():
        return module(input_ids=torch.tensor([IDS])).logits[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {}),
    "rslora": ("llama", {}, {"use_rslora": True}),
    "dora": ("llama", {}, {"use_dora": True}),
    "ranks and alphas by layer": (
        ("llama"),
        {},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}, "layers_to_transform": [0, 1]},
    ),
    "all linear": ("llama", {}, {"target_modules": "all-linear"}),
    "embeddings": ("llama", {}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied head": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
    "saved head": ("llama", {}, {"modules_to_save": ["lm_head"]}),
    "saved norms": ("llama", {}, {"modules_to_save": ["post_attention_layernorm"]}),
    "trained tokens": ("llama", {}, {"trainable_token_indices": {"embed_tokens": [5, 7, IDS[3]]}}),
    "transposed weights": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused projections": ("phi3", {}, {"target_modules": ["qkv_proj", "down_proj"]}),
    "experts": ("mixtral", {}, {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_logits_are_those_of_pefts_forward(kind: str, tmp_path: Path) -> None:
    family, sizes, settings = KINDS[kind]
    base(tmp_path / "model", family, **sizes)
    adapter = adapt(tmp_path / "model", tmp_path / "adapter", **settings)
    expected = peft_logits(tmp_path / "model", [adapter], IDS)
    assert error(logits(tmp_path / "model", adapter), expected) < CLOSE
    assert error(logits(tmp_path / "model"), expected) > 100 * CLOSE


def test_several_adapters_add_up(tmp_path: Path) -> None:
    base(tmp_path / "model")
    one = adapt(tmp_path / "model", tmp_path / "one")
    other = adapt(tmp_path / "model", tmp_path / "other", seed=1, r=2, target_modules=["v_proj", "o_proj"])
    expected = peft_logits(tmp_path / "model", [one, other], IDS)
    assert error(logits(tmp_path / "model", one, other), expected) < CLOSE
    assert error(logits(tmp_path / "model", other, one), expected) < CLOSE
    for wrong in ((one,), (other,), (one, one)):
        assert error(logits(tmp_path / "model", *wrong), expected) > 100 * CLOSE


def swapped(tensors: dict[str, Tensor]) -> None:
    """A and B for each other, where both have the same sides."""
    for name in [name for name in tensors if "q_proj.lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[other].T.contiguous(), tensors[name].T.contiguous()


def without_last_layer(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if ".layers.2." in name and "lora_B" in name:
            tensors[name].zero_()


WRONG: dict[str, Callable[[Path], object]] = {
    "without scaling": lambda folder: edit_settings(folder, lora_alpha=4),
    "alpha / r for alpha / sqrt(r)": lambda folder: edit_settings(folder, use_rslora=False),
    "A and B swapped": lambda folder: edit_tensors(folder, swapped),
    "a layer left out": lambda folder: edit_tensors(folder, without_last_layer),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_give_other_logits(wrong: str, tmp_path: Path) -> None:
    base(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "adapter", use_rslora=True)
    expected = peft_logits(tmp_path / "model", [adapter], IDS)
    shutil.copytree(adapter, tmp_path / "wrong")
    WRONG[wrong](tmp_path / "wrong")
    assert error(logits(tmp_path / "model", tmp_path / "wrong"), expected) > 100 * CLOSE
    assert error(logits(tmp_path / "model", adapter), expected) < CLOSE


def test_weights_are_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    module = base(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "adapter")
    merged = peft_model(tmp_path / "model", [adapter]).merge_and_unload().state_dict()
    loaded = load_hf(tmp_path / "model", adapter=str(adapter), dtype="bfloat16").module.state_dict()
    assert all(torch.equal(loaded[name], merged[name].bfloat16()) for name in merged)
    name = "model.layers.0.self_attn.q_proj.weight"
    added = merged[name] - module.get_parameter(name)
    twice = (module.get_parameter(name).bfloat16().float() + added).bfloat16()
    assert not torch.equal(loaded[name], twice)


@pytest.mark.parametrize("form", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32])
def test_weights_of_a_gguf_file_are_rounded_once(
    form: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", form=form, hidden_size=64, intermediate_size=96)
    module = load_hf(tmp_path / "m.gguf", dtype="float32").module
    module.save_pretrained(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "adapter")
    merged = peft_model(tmp_path / "model", [adapter]).merge_and_unload().state_dict()
    loaded = load_hf(tmp_path / "m.gguf", adapter=str(adapter), dtype="bfloat16").module.state_dict()
    assert loaded.keys() == merged.keys()
    assert all(torch.equal(loaded[name], merged[name].bfloat16()) for name in merged)
    name = "model.layers.0.self_attn.q_proj.weight"
    added = merged[name] - module.get_parameter(name)
    assert not torch.equal(loaded[name], (module.get_parameter(name).bfloat16().float() + added).bfloat16())


def test_a_gguf_file_that_cannot_be_kept_is_not_rounded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf").save_pretrained(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "adapter")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        OSError, match=r"m\.gguf as safetensors.*4 bytes a weight; merge .* or use model\.dtype=float32"
    ):
        load_hf(tmp_path / "m.gguf", adapter=str(adapter), dtype="bfloat16")
    with pytest.warns(UserWarning, match="until then every process unpacks the file"):
        load_hf(tmp_path / "m.gguf", adapter=str(adapter), dtype="float32")


def test_mapped_weights_are_not_written(tmp_path: Path) -> None:
    base(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "adapter")
    file = tmp_path / "model" / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    plain = load_hf(tmp_path / "model")
    kept = {name: weight.clone() for name, weight in plain.module.state_dict().items()}
    adapted = load_hf(tmp_path / "model", adapter=str(adapter))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert all(torch.equal(weight, kept[name]) for name, weight in plain.module.state_dict().items())
    assert adapted.is_mapped
    changed = {name for name, weight in adapted.module.state_dict().items() if not torch.equal(weight, kept[name])}
    assert changed == {
        name for name in kept if any(f"{part}.weight" in name for part in ("q_proj", "v_proj", "down_proj"))
    }


def test_an_adapter_on_a_stage_of_several_ranks_is_cut_with_the_weights(rank_pools: RankPools, tmp_path: Path) -> None:
    """Shares that are loaded in parts equal, bit by bit, those of the whole model, into which it is merged before."""
    cases = {
        "plain": ({}, {}),
        "dora": ({}, {"use_dora": True}),
        "tied head": ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
        "tied embeddings": ({"tie_word_embeddings": True}, {"target_modules": ["k_proj", "embed_tokens"]}),
        "saved head": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
        "copied heads": ({"num_key_value_heads": 1}, {"target_modules": ["k_proj", "v_proj"]}),
    }
    given = []
    for name, (sizes, settings) in cases.items():
        base(tmp_path / name / "model", **(SIZES | sizes))
        given.append(
            options(tmp_path / name / "model", adapt(tmp_path / name / "model", tmp_path / name / "a", **settings))
        )
    base(tmp_path / "experts" / "model", "mixtral", **SIZES)
    parts = {"target_parameters": ["experts.down_proj"]}
    given.append(
        options(tmp_path / "experts" / "model", adapt(tmp_path / "experts" / "model", tmp_path / "e", **parts))
    )
    for found in rank_pools.run(2, differences, given):
        assert not {name: wrong for name, wrong in zip([*cases, "experts"], found, strict=True) if wrong}


@pytest.mark.parametrize(("size", "num_shares"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_chain_answers_as_peft_does(rank_pools: RankPools, size: int, num_shares: int, tmp_path: Path) -> None:
    base(tmp_path / "model", **SIZES)
    adapter = adapt(tmp_path / "model", tmp_path / "adapter")
    expected = peft_logits(tmp_path / "model", [adapter], IDS)[-1]
    found = rank_pools.run(size, tasks.last_logits, options(tmp_path / "model", adapter), IDS, num_shares)
    assert error(torch.tensor(found[-1]), expected) < CLOSE
    plain = rank_pools.run(size, tasks.last_logits, options(tmp_path / "model"), IDS, num_shares)
    assert error(torch.tensor(plain[-1]), expected) > 100 * CLOSE


def test_the_prediction_of_memory_has_the_merged_weights(tmp_path: Path) -> None:
    """Those are no longer mapped: of one more MB than the file has, as 3 float32 copies are made of the largest."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    base(tmp_path / "model", **sizes)
    adapter = adapt(tmp_path / "model", tmp_path / "adapter", target_modules="all-linear")
    loaded = load_hf(tmp_path / "model", adapter=str(adapter))
    plain = load_hf(tmp_path / "model")
    largest = 4 * 512 * 2048
    assert loaded.memory.weights_bytes == plain.memory.weights_bytes
    more = [each.memory.predicted_load_peak_bytes - each.memory.base_bytes for each in (loaded, plain)]
    of_layers = sum(w.nbytes for name, w in plain.module.state_dict().items() if "proj.weight" in name)
    assert more[0] - more[1] == 3 * largest + of_layers
    assert loaded.memory.load_peak_bytes <= 1.1 * loaded.memory.predicted_load_peak_bytes + 2**24


def test_the_model_is_told_by_the_adapters_name(tmp_path: Path) -> None:
    base(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "poems")
    model = Model.load(options(tmp_path / "model", adapter), CPU)
    assert model.name == f"{tmp_path / 'model'}+poems" and list(model.adapter_names) == ["poems"]
    assert model.weights_in_words == "with adapter poems"
    model.stored_as, model.adapter_names = "awq, 4 bits, dequantised to float32", ("poems", "prose")
    assert model.weights_in_words == "awq, 4 bits, dequantised to float32, with adapters poems, prose"
    assert Model.load(options(tmp_path / "model"), CPU).weights_in_words == ""


def test_an_adapter_of_the_hub_has_the_name_of_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its revision: the hub's library hands out a folder that is called by the commit."""
    base(tmp_path / "model")
    snapshot = adapt(tmp_path / "model", tmp_path / "models--org--poems" / "snapshots" / ("3f9a" * 10))
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, **_: asked.append(name) or str(snapshot))
    run = ModelOptions(name="hf", path=str(tmp_path / "model"), adapter=["org/poems"])
    loaded = load(run, device=CPU, attn_implementation="eager")
    assert asked == ["org/poems"]
    assert loaded.name == f"{tmp_path / 'model'}+poems" and list(loaded.adapter_names) == ["poems"]


def merged_once(model: Path, adapter: Path) -> dict[str, Tensor]:
    """peft's merge in float32 of the stored numbers, rounded once."""
    return {
        name: weight.bfloat16() for name, weight in peft_model(model, [adapter]).merge_and_unload().state_dict().items()
    }


def test_a_renamed_weight_is_rounded_once(tmp_path: Path) -> None:
    """Mixtral's files have their routers under another name than the model."""
    base(tmp_path / "model", "mixtral")
    adapter = adapt(tmp_path / "model", tmp_path / "a", target_parameters=["mlp.gate.weight"])
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.gate.weight" in stored
    loaded = load_hf(tmp_path / "model", adapter=str(adapter), dtype="bfloat16").module.state_dict()
    name, expected = "model.layers.0.mlp.gate.weight", merged_once(tmp_path / "model", adapter)
    assert torch.equal(loaded[name], expected[name])
    assert not torch.equal(loaded[name], stored["model.layers.0.block_sparse_moe.gate.weight"].bfloat16())


def test_a_wide_tensor_that_does_not_change_is_no_hindrance(tmp_path: Path) -> None:
    """Experts that are stored one by one in bfloat16, beside a norm in float32."""
    base(tmp_path / "model", "mixtral").bfloat16().save_pretrained(tmp_path / "model")
    edit_weights(tmp_path / "model", lambda weights: weights.update({NORM: weights[NORM].float() + 1e-4}))
    adapter = adapt(tmp_path / "model", tmp_path / "a", target_parameters=["experts.down_proj"])
    loaded = load_hf(tmp_path / "model", adapter=str(adapter), dtype="bfloat16").module.state_dict()
    expected = merged_once(tmp_path / "model", adapter)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


NORM = "model.norm.weight"


class Room(Exception):
    """Ends a load before weights are read."""


def test_merging_takes_memory_of_the_host_where_a_gpu_has_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = base(tmp_path / "model")
    adapter = adapt(tmp_path / "model", tmp_path / "a", target_modules=["embed_tokens"])
    asked = []

    def require(footprint: Footprint, device: torch.device, **_: Any) -> None:
        asked.append((device.type, footprint))
        if device.type == "cuda":
            raise Room

    for path in ("loading.building", "lora.merging"):
        monkeypatch.setattr(f"runahead.model.{path}.require_room", require)
    with pytest.raises(Room):
        load(options(tmp_path / "model", adapter), device=torch.device("cuda"), attn_implementation="eager")
    weights = sum(parameter.nbytes for parameter in module.parameters())
    embeddings = module.get_input_embeddings().weight.nbytes
    assert asked == [("cpu", Footprint(copied=3 * embeddings)), ("cuda", Footprint(copied=weights))]
