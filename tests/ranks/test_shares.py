"""Ranks that share a model load their shares only: the same values as of the whole model, in less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from runahead import ModelOptions
from runahead.config import ModelName
from tests.conftest import RankPools
from tests.families import FAMILIES, build, prompt
from tests.model.test_loading_forms import FP8, to_fp8
from tests.model.test_loading_gguf import write_gguf
from tests.model.test_loading_hf import edit_config
from tests.rank_pool import RankPool
from tests.ranks import share_tasks as tasks
from tests.ranks.tensor_tasks import SIZES

ROOT = Path(__file__).resolve().parents[2]

PLANNED = sorted(
    name
    for name, family in FAMILIES.items()
    if getattr(AutoConfig.for_model(family.model_type), "base_model_tp_plan", None) and family.model_type != "falcon"
)
"""Families with a tensor-parallel plan in the installed transformers."""


def saved(folder: Path, family: str = "llama", **sizes: Any) -> ModelOptions:
    build(family, dtype=torch.float32, **(SIZES | sizes)).save_pretrained(folder)
    return ModelOptions(name=ModelName.hf, path=str(folder))


SOME = ["llama", "gpt_neox", "phi3", "gemma2", "llama4_text", "mixtral"]
"""One of each kind: plain, fused projections, norms around, experts stored together and one by one."""

slowly = pytest.mark.slow


@pytest.mark.parametrize(("families", "size"), [(SOME, 2), (SOME, 4), pytest.param(PLANNED, 2, marks=slowly)])
def test_parts_of_checkpoints_are_those_of_the_whole_model(
    rank_pools: RankPools, tmp_path: Path, families: list[str], size: int
) -> None:
    names = [*families, "tied", "bias"]
    options = [saved(tmp_path / family, family) for family in families]
    options += [saved(tmp_path / "tied", tie_word_embeddings=True), saved(tmp_path / "bias", attention_bias=True)]
    for found in rank_pools.run(size, tasks.differences, options):
        assert not {name: wrong for name, wrong in zip(names, found, strict=True) if wrong}


@pytest.mark.parametrize("families", [SOME, pytest.param(PLANNED, marks=slowly)])
def test_parts_of_random_weights_are_those_of_the_whole_model(
    rank_pools: RankPools, tmp_path: Path, families: list[str]
) -> None:
    options = []
    for family in families:
        (tmp_path / family).mkdir()
        build(family, **SIZES).config.save_pretrained(tmp_path / family)
        options.append(ModelOptions(name=ModelName.random, config=str(tmp_path / family), seed=7, dtype="float32"))
    for found in rank_pools.run(2, tasks.differences, options):
        assert not {name: wrong for name, wrong in zip(families, found, strict=True) if wrong}


def test_share_of_a_gguf_file_is_that_of_its_conversion(rank_pools: RankPools, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    options = ModelOptions(name=ModelName.hf, path=str(tmp_path / "tiny.gguf"))
    for found in rank_pools.run(2, tasks.differences_with_cache, str(tmp_path / "cache"), [options]):
        assert found == [[]]
    assert len(list((tmp_path / "cache" / "gguf").glob("*/model.safetensors"))) == 1
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file")
    for message in rank_pools.run(2, tasks.message_of_loading, options, path):
        assert "set RUNAHEAD_CACHE to a folder with room" in message and "until then" not in message


def test_several_files_and_another_dtype(rank_pools: RankPools, tmp_path: Path) -> None:
    module = build("llama", dtype=torch.float32, **SIZES)
    module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    options = [ModelOptions(name=ModelName.hf, path=str(tmp_path), dtype=dtype) for dtype in ("auto", "bfloat16")]
    for found in rank_pools.run(2, tasks.differences, options):
        assert found == [[], []]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_quantised_weights_are_unpacked_before_they_are_shared_out(
    rank_pools: RankPools, tmp_path: Path, family: str
) -> None:
    options = saved(tmp_path, family)
    to_fp8(tmp_path, "_scale_inv")
    edit_config(tmp_path, quantization_config=FP8)
    for found in rank_pools.run(2, tasks.differences, [options]):
        assert found == [[]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 4), (8, 1, 2), (8, 1, 4), (9, 3, 3), (6, 2, 2), (8, 4, 4)]
)
@pytest.mark.sampled(3)
def test_tokens_are_the_whole_models_with_kv_heads_split_or_copied(
    rank_pools: RankPools, tmp_path: Path, heads: int, kv_heads: int, size: int
) -> None:
    width = heads * 8
    options = saved(
        tmp_path, hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, attention_bias=True
    )
    ids = torch.tensor([prompt(30)])
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = module.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 30:]
    for tokens, held in rank_pools.run(size, tasks.tokens_of_shares, options, prompt(30)):
        assert tokens == expected.tolist()
        assert held == [max(1, kv_heads // size)] * 3


@pytest.mark.parametrize(("kv_heads", "are_refused"), [(2, True), (4, False)])
def test_policies_that_need_all_queries_of_a_kv_head(
    rank_pools: RankPools, tmp_path: Path, kv_heads: int, are_refused: bool
) -> None:
    options = saved(tmp_path, hidden_size=64, num_attention_heads=8, num_key_value_heads=kv_heads)
    refused = ["snapkv", "pyramidkv", "chunkkv", "r_kv", "h2o", "keyformer", "scissorhands"]
    # The last two vote by KV head after a step that chooses by head, and else with all heads of the model.
    refused += ["expected_attention", "quest", "kvzip", "zigzagkv", "fastgen", "keydiff+tova", "pyramidinfer+lagkv"]
    names = [*refused, "streaming_llm", "window", "keydiff", "tova", "lagkv", "k_centers", "pyramidinfer", "offload"]
    names += ["window+tova", "pyramidinfer+tova", "tova+offload"]
    if not are_refused:
        refused = []
    assert rank_pools.run(4, tasks.refused_policies, options, names) == [refused] * 4


def test_fingerprint_is_the_whole_models(rank_pools: RankPools, tmp_path: Path) -> None:
    options = [
        saved(tmp_path / "llama", num_key_value_heads=2, attention_bias=True),
        saved(tmp_path / "moe", "mixtral"),
        saved(tmp_path / "tied", tie_word_embeddings=True),
    ]
    for each in options:
        for size in (2, 4):
            found = rank_pools.run(size, tasks.fingerprints, each)
            assert len({fingerprint for of_rank in found for fingerprint in of_rank}) == 1


class TestRefusals:
    """One sentence on every rank."""

    def test_weights_of_other_shapes(self, rank_pools: RankPools, tmp_path: Path) -> None:
        options = saved(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.self_attn.q_proj.weight"
        weights[name] = weights[name][:32]
        save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "model.safetensors")
        for message in rank_pools.run(2, tasks.message_of_loading, options):
            assert name in message and "has shape" in message and "\n" not in message

    def test_missing_weights(self, rank_pools: RankPools, tmp_path: Path) -> None:
        options = saved(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, tmp_path / "model.safetensors")
        for message in rank_pools.run(2, tasks.message_of_loading, options):
            assert "not in the files, such as model.norm.weight" in message

    def test_weights_that_the_model_does_not_take(self, rank_pools: RankPools, tmp_path: Path) -> None:
        options = saved(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(8)
        save_file(weights, tmp_path / "model.safetensors")
        for message in rank_pools.run(2, tasks.message_of_loading, options):
            assert "no place for 1 of the stored tensors, such as model.layers.0.self_attn.q_proj.bias" in message
        del weights["model.layers.0.self_attn.q_proj.bias"]
        weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
        save_file(weights, tmp_path / "model.safetensors")
        for message in rank_pools.run(2, tasks.message_of_loading, options):
            assert "stored as I8, such as model.layers.0.mlp.up_proj.weight" in message

    def test_weights_that_are_not_numbers(self, rank_pools: RankPools, tmp_path: Path) -> None:
        options = saved(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.norm.weight"][3] = torch.nan
        save_file(weights, tmp_path / "model.safetensors")
        for message in rank_pools.run(2, tasks.message_of_loading, options):
            assert "its weight model.norm.weight holds NaN or infinity" in message


WIDE = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
"""443 MB of weights, of which the largest tensor has 33 MB."""


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    return tmp_path


@pytest.mark.slow
def test_model_that_one_rank_may_not_allocate_runs_on_two_shares(rank_pools: RankPools, wide: Path) -> None:
    overrides = ["prefill=tensor", "model=random", f"model.config={wide}", "prompt.random_tokens=40"]
    overrides += ["generation.max_new_tokens=3", f"report={wide / 'report.json'}"]
    limit = 380 * 10**6
    [alone] = rank_pools.run(1, tasks.run_program_within, limit, overrides)
    assert "needs 443.1 MB of memory for its weights, but" in alone
    assert rank_pools.run(2, tasks.run_program_within, limit, overrides) == ["ok", "ok"]
    report = json.loads((wide / "report.json").read_text())
    for rank in report["ranks"]:
        assert 443e6 / 2 < rank["memory"]["weights_bytes"] < 443e6 / 2 + 1e6


@pytest.mark.slow
@pytest.mark.parametrize("source", ["random", "hf"])
def test_peak_memory_while_loading_is_as_predicted(wide: Path, source: str) -> None:
    options = ModelOptions(name=ModelName.random, config=str(wide), dtype="float32")
    if source == "hf":
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(wide)).save_pretrained(wide)
        options = ModelOptions(name=ModelName.hf, path=str(wide))
    for size in (1, 2, 4):
        with closing(RankPool(size)) as pool:  # new processes: in used ones the weights would take memory that is there
            for memory in pool.run(tasks.memory_of_loading, options):
                assert memory.load_peak_bytes == pytest.approx(memory.predicted_load_peak_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [512, 1536])
@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_peak_memory_of_a_process_is_as_predicted(wide: Path, num_shares: int, num_tokens: int) -> None:
    config = WIDE | {"num_key_value_heads": 8, "intermediate_size": 2816}
    (wide / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "launch/infer.py"]
    command += ["model=random", f"model.config={wide}", f"prompt.random_tokens={num_tokens}"]
    command += [f"ranks.tensor={num_shares}", "partition=even"]
    command += ["generation.max_new_tokens=3", "ranks.device=cpu", "ranks.threads=1", f"report={wide / 'report.json'}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for rank in json.loads((wide / "report.json").read_text())["ranks"]:
        memory = rank["memory"]
        assert memory["load_peak_bytes"] == pytest.approx(memory["predicted_load_peak_bytes"], rel=0.05)
        # A rank that is kept waiting by the machine frees some of its buffers before others of its own are there.
        assert 0.9 < memory["peak_bytes"] / memory["predicted_peak_bytes"] < 1.05
