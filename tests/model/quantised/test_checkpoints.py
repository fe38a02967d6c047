"""model=hf with quantised checkpoints: what is loaded is the dequantised model, on one rank and on several."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, even
from runahead.config import DType, Fuse, Weights
from runahead.model.loading import checkpoint
from runahead.model.loading.memory import Footprint
from runahead.model.loading.quantised import Form
from runahead.model.loading.quantised.packed import PackedWeight
from tests import families
from tests.conftest import RankPools
from tests.families import prompt
from tests.model.quantised import checkpoints
from tests.model.test_int8 import load_kernels
from tests.model.test_loading_hf import edit_config, edit_weights, load_hf, refusal
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


def test_decoded_weights_count_as_copied_and_plain_ones_as_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are read lie beside those made of them, in four threads: also plain ones of another dtype."""
    expected = checkpoints.save(tmp_path, "int4", tie_word_embeddings=False)
    plain = [each.numel() for name, each in expected.items() if not checkpoints.LINEAR.fullmatch(name)]
    decoded = [each.numel() for name, each in expected.items() if checkpoints.LINEAR.fullmatch(name)]
    stored = [num // 2 + num // GROUP * 2 + num // GROUP // 2 + 2 * 8 for num in decoded]  # codes, scales, zeros, shape
    four = lambda sizes: sum(sorted(sizes)[-4:])  # noqa: E731
    found = loaded_footprint(monkeypatch, tmp_path)
    assert found == Footprint(copied=sum(decoded) * 4, mapped=sum(plain) * 4, whole=four(stored))
    in_half = loaded_footprint(monkeypatch, tmp_path, dtype="bfloat16")
    whole = four([*stored, *(4 * num for num in plain)])
    assert in_half == Footprint(copied=sum(decoded + plain) * 2, whole=whole) and whole > 1.5 * found.whole


def save_with_plain_layers(folder: Path) -> None:
    """A quantised checkpoint in which the first layer's q and v, and the second layer's MLP, are stored plain."""
    expected = checkpoints.save(folder, "int4", tie_word_embeddings=False)

    def change(weights: dict[str, torch.Tensor]) -> None:
        for owner in ("0.self_attn.q", "0.self_attn.v", "1.mlp.gate", "1.mlp.up", "1.mlp.down"):
            name = f"model.layers.{owner}_proj.weight"
            for each in [each for each in weights if each.startswith(name)]:
                del weights[each]
            weights[name] = expected[name].float()

    edit_weights(folder, change)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of a process's memory")
@pytest.mark.parametrize("fuse", ["off", "auto", "on"])
def test_weights_are_counted_where_they_are_once_they_are_fused(
    fuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused layers have memory of their own: what is fused there is not mapped before."""
    save_with_plain_layers(tmp_path)
    file = str(tmp_path / "model.safetensors")
    counted = loaded_footprint(monkeypatch, tmp_path, fuse=fuse)
    model = Model.load(ModelOptions(name="hf", path=str(tmp_path), fuse=Fuse[fuse]), torch.device("cpu"))
    places = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    mapped = {
        name: weight.nbytes
        for name, weight in model.module.named_parameters()
        if any(holds(line, weight) for line in places)
    }
    num_bytes = sum(weight.nbytes for weight in model.module.parameters())
    assert (counted.mapped, counted.copied) == (sum(mapped.values()), num_bytes - sum(mapped.values()))
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} <= set(mapped)
    assert ("model.layers.0.self_attn.q_proj.weight" in mapped) == (fuse == "off")
    if fuse != "off":  # else the layers are not fused
        layers = model.module.model.layers[0].self_attn
        assert layers.k_proj.weight.data_ptr() == layers.q_proj.weight.data_ptr() + layers.q_proj.weight.nbytes


@pytest.mark.parametrize("form", [None, "int4", "gptq"])
def test_a_load_reads_headers_once(form: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more where a quantised checkpoint's plain tensors are mapped; codes are looked for once."""
    if form is None:
        families.build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    else:
        checkpoints.save(tmp_path, form)
    opened, looked = list[dict[str, Any]](), list[str]()
    own, found = checkpoint.safe_open, Form.found
    monkeypatch.setattr(checkpoint, "safe_open", lambda *args, **how: (opened.append(how), own(*args, **how))[1])
    monkeypatch.setattr(Form, "found", lambda self, stored: (looked.append(self.name), found(self, stored))[1])
    load_hf(tmp_path)
    by_read, by_map = {"framework": "pt", "backend": "pread"}, {"framework": "pt"}
    assert opened == ([by_read] if form is None else [by_read, by_map]) and len(looked) == (form is not None)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of a process's memory")
@pytest.mark.parametrize("weights", Weights)
def test_weights_that_are_stored_plain_stay_in_the_page_cache(weights: Weights, tmp_path: Path) -> None:
    """But for those that are converted to another dtype: of these the file's pages would stay beside them."""
    if weights is Weights.int8:
        load_kernels()
    checkpoints.save(tmp_path, "int8")

    def maps(dtype: DType) -> tuple[bool, torch.Tensor]:
        module = load_hf(tmp_path, dtype=dtype, weights=weights).module
        embeddings = module.get_input_embeddings().weight
        [place] = [line for line in Path("/proc/self/maps").read_text().splitlines() if holds(line, embeddings)]
        return place.endswith(str(tmp_path / "model.safetensors")), embeddings

    is_mapped, embeddings = maps(DType.float32)
    is_mapped_too, rounded = maps(DType.bfloat16)
    assert is_mapped and not is_mapped_too
    assert torch.equal(rounded, embeddings.bfloat16())


def holds(line: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory that a line of /proc/self/maps is about."""
    first, last = (int(each, 16) for each in line.split()[0].split("-"))
    return first <= tensor.data_ptr() < last


GROUP = checkpoints.GROUP


def test_a_parameter_that_is_called_a_scale_is_the_models(tmp_path: Path) -> None:
    """Gemma 4's routers have a `scale` and no weight of their own."""
    sizes = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    expected = checkpoints.save(tmp_path, "fp8_blocks", "gemma4_text", **sizes)
    assert any(name.endswith("router.scale") for name in expected)
    weights = load_hf(tmp_path).module.state_dict()
    name = next(name for name in weights if name.endswith("router.scale"))
    assert torch.equal(weights[name], expected[name].float())
    edit_weights(tmp_path, lambda tensors: tensors.update({"model.layers.0.other.scale": torch.ones(3)}))
    assert "no place for 1 of the stored tensors, such as model.layers.0.other.scale" in refusal(
        lambda: load_hf(tmp_path)
    )


WRONG_SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no group": ("gptq", {"group_size": "all"}, "group_size='all' of its settings is no whole number"),
    "null": ("gptq", {"group_size": None}, "group_size=None of its settings is no whole number"),
    "empty group": ("gptq", {"group_size": 0}, "a group of 0 columns"),
    "of awq": ("awq", {"group_size": None}, "group_size=None of its settings is no whole number"),
    "empty of awq": ("awq", {"group_size": -2}, "a group of -2 columns"),
    "blocks": ("fp8_blocks", {"weight_block_size": 16}, "weight_block_size=16 of its settings"),
    "empty blocks": ("fp8_blocks", {"weight_block_size": [16, 0]}, "weight_block_size=[16, 0] of its settings"),
}


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_settings_that_are_wrong_are_told(case: str, tmp_path: Path) -> None:
    form, wrong, words = WRONG_SETTINGS[case]
    checkpoints.save(tmp_path, form)
    edit_config(tmp_path, quantization_config=checkpoints.FORMS[form][1] | wrong)
    assert words in refusal(lambda: load_hf(tmp_path))


def test_bits_may_be_called_w_bit_and_have_to_be_there(tmp_path: Path) -> None:
    """Unless shapes tell them; here zeros have the shape of no number of bits."""
    checkpoints.save(tmp_path, "gptq")
    name = "model.layers.0.mlp.up_proj.qzeros"
    edit_weights(tmp_path, lambda weights: weights.update({name: weights[name][:, :1].contiguous()}))
    for settings, words in (({"w_bit": 4}, f"{name} has shape"), ({}, "its settings lack bits")):
        about = {"quant_method": "gptq", "group_size": 16} | settings
        edit_config(tmp_path, quantization_config=about)
        assert words in refusal(lambda: load_hf(tmp_path))


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_part_without_numbers_is_told(form: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, form)
    name = "model.layers.0.mlp.up_proj.scales"
    edit_weights(tmp_path, lambda weights: weights.update({name: weights[name][:, :0].contiguous()}))
    assert f"{name} has shape" in refusal(lambda: load_hf(tmp_path))


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


# ---------------------------------------------------------------- kept in the cache folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dequantized"


def unreadable(*_: Any) -> Any:
    raise AssertionError("decoded again")


@pytest.mark.parametrize("form", ["gptq", "nf4"])
def test_later_starts_map_what_was_kept(
    form: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(tmp_path / "m", form, "mixtral")
    expected = load_hf(tmp_path / "m").module.state_dict()
    assert not cache.exists()
    load_hf(tmp_path / "m", keep_dequantized=True)
    monkeypatch.setattr(PackedWeight, "__getitem__", unreadable)
    loaded = load_hf(tmp_path / "m", keep_dequantized=True)
    assert loaded.is_mapped and loaded.stored_as == checkpoints.FORMS[form][2]
    weights = loaded.module.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_each_dtype_is_kept_and_what_is_outdated_is_removed(tmp_path: Path, cache: Path) -> None:
    checkpoints.save(tmp_path / "m", "awq")
    for dtype in (DType.float32, DType.bfloat16):
        load_hf(tmp_path / "m", keep_dequantized=True, dtype=dtype)
    assert {each.name.split("-")[1] for each in cache.iterdir() if each.is_dir()} == {"float32", "bfloat16"}
    edit_weights(tmp_path / "m", lambda weights: weights["model.layers.0.mlp.up_proj.scales"].mul_(2))
    twice = load_hf(tmp_path / "m", keep_dequantized=True).module.state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert [each.name.split("-")[1] for each in cache.iterdir() if each.is_dir()] == ["float32"]
    assert torch.equal(twice, load_hf(tmp_path / "m").module.state_dict()["model.layers.0.mlp.up_proj.weight"])


def test_what_was_kept_by_other_settings_is_not_used(tmp_path: Path, cache: Path) -> None:
    """Settings may be in a file beside the config and the weights, which both stay as they are."""
    checkpoints.save(tmp_path / "m", "gptq")
    edit_config(tmp_path / "m", quantization_config=None)
    settings, file = checkpoints.FORMS["gptq"][1], tmp_path / "m" / "quantize_config.json"
    file.write_text(json.dumps(settings))
    first = load_hf(tmp_path / "m", keep_dequantized=True).module.state_dict()
    file.write_text(json.dumps(settings | {"checkpoint_format": "gptq_v2"}))
    found = load_hf(tmp_path / "m", keep_dequantized=True).module.state_dict()
    expected, name = load_hf(tmp_path / "m").module.state_dict(), "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert not torch.equal(found[name], first[name])


@pytest.mark.parametrize("in_hubs_cache", [True, False])
def test_a_new_revision_of_the_hub_takes_the_place_of_the_one_before(
    in_hubs_cache: bool, tmp_path: Path, cache: Path
) -> None:
    """Folders elsewhere are models of their own."""
    names = ("a" * 40, "b" * 40) if in_hubs_cache else ("one", "other")
    folders = [tmp_path / "models--org--m" / "snapshots" / each for each in names]
    for folder in folders:
        checkpoints.save(folder, "awq")
        load_hf(folder, keep_dequantized=True)
    assert len([each for each in cache.iterdir() if each.is_dir()]) == (1 if in_hubs_cache else 2)


def test_an_unwritable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "m", "awq")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="until then every process dequantises them"):
        assert load_hf(tmp_path / "m", keep_dequantized=True).stored_as == "awq, 4 bits"


def test_what_keeping_does_not_go_with_is_refused() -> None:
    for other in ({"adapter": ["folder"]}, {"dequantize": False}):
        with pytest.raises(ValueError, match="model.keep_dequantized=true does not go with"):
            ModelOptions(name="hf", path="x", keep_dequantized=True, **other)


# ---------------------------------------------------------------- on several ranks


def chain_logits(ranks: Ranks, options: ModelOptions, ids: list[int]) -> list[tuple[int, float]]:
    engine = Engine(Model.load(options, ranks.device), ranks, partition=even)
    batch = engine.generate([ids], GenerationOptions(max_new_tokens=4, ignore_eos=True))
    return batch.generations[0].first_token_logits_top5


@pytest.mark.parametrize("form", checkpoints.FORMS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.sampled(8)
def test_logits_of_chains_are_those_of_transformers(
    size: int, form: str, rank_pools: RankPools, tmp_path: Path
) -> None:
    expected = checkpoints.save(tmp_path / "m", form)
    module = plain(tmp_path / "m", expected)
    with torch.no_grad():
        logits = module(torch.tensor([prompt(30)])).logits[0, -1]
    values, tokens = logits.topk(5)
    options = ModelOptions(name="hf", path=str(tmp_path / "m"))
    found = rank_pools.run(size, chain_logits, options, prompt(30))[0]
    assert [token for token, _ in found] == tokens.tolist()
    torch.testing.assert_close(torch.tensor([logit for _, logit in found]), values, rtol=1e-4, atol=1e-4)


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
