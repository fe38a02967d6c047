"""A pipeline of layers: its logits and tokens are transformers' own, and it sends hidden states alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.inputs.options import PartitionName, PartitionOptions, RunOptions, ineffective_settings
from partitioner.simulation.pipeline import simulate_pipeline
from runahead import ContextPartition, GenerationOptions, ModelOptions, PrefillOptions, even
from runahead.config import DType, ModelName, PrefillName
from tests.conftest import RankPools
from tests.families import FAMILIES, build, largest_difference, oracle_logits, oracle_tokens, prompt, save_tiny_config
from tests.ranks import pipeline_tasks
from tests.ranks.test_batch import BATCH
from tests.ranks.test_exactness import FLOAT32_TOLERANCE, PROMPT_TOKENS, TOLERANCE
from tests.ranks.test_memory import DEEP_LAYERS, LAYER_BYTES

BY_LENGTH = ("llama_dynamic_ntk", "phi3_longrope")
"""Families whose angles depend on the length of the text, which the table refuses."""
HIDDEN_BYTES = 32 * 8
"""Hidden states of a token in float64."""


def check_logits(
    rank_pools: RankPools,
    size: int,
    family: str,
    prompts: list[list[int]],
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float64,
) -> None:
    chunks = [None, 1 if max(map(len, prompts)) < 10 else 23, 40]
    by_rank = rank_pools.run(size, pipeline_tasks.prefill_each, family, prompts, chunks, 1, dtype)
    for outcomes in zip(*by_rank, strict=True):
        assert [outcome.logits is not None for outcome in outcomes] == [False] * (size - 1) + [True]
        assert all(outcome.holds_cache for outcome in outcomes)
        for ids, ours in zip(prompts, outcomes[-1].logits, strict=True):
            assert largest_difference(ours, oracle_logits(family, tuple(ids), dtype)) < tolerance, len(ids)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in BY_LENGTH])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.sampled(12)
def test_first_logits_equal_transformers_for_every_family(rank_pools: RankPools, size: int, family: str) -> None:
    check_logits(rank_pools, size, family, [prompt(PROMPT_TOKENS)])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])
@pytest.mark.parametrize("size", [2, 3])
def test_padded_rows_equal_transformers_on_each_prompt_alone(rank_pools: RankPools, family: str, size: int) -> None:
    check_logits(rank_pools, size, family, BATCH)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_short_prompts(rank_pools: RankPools, num_tokens: int) -> None:
    check_logits(rank_pools, 3, "llama", [prompt(num_tokens)])


def test_float32(rank_pools: RankPools) -> None:
    check_logits(rank_pools, 2, "llama", [prompt(PROMPT_TOKENS)], FLOAT32_TOLERANCE, torch.float32)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "bloom"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_greedy_tokens_equal_generate_on_every_rank(rank_pools: RankPools, family: str, size: int) -> None:
    """A second call follows the first one, so nothing of it is on its way any more."""
    options = GenerationOptions(max_new_tokens=6, ignore_eos=True)
    by_rank = rank_pools.run(size, pipeline_tasks.generate, family, BATCH, options, 16, 2)
    expected = [oracle_tokens(family, tuple(ids), 6) for ids in BATCH]
    for rank, calls in enumerate(by_rank):
        for batch, steps in calls:
            assert [row.new_token_ids for row in batch.generations] == expected
            assert steps == ([list(step) for step in zip(*expected, strict=True)] if rank == 0 else [])


def test_rows_end_alike_on_all_ranks(rank_pools: RankPools) -> None:
    expected = [oracle_tokens("llama", tuple(ids), 9) for ids in BATCH]
    options = GenerationOptions(max_new_tokens=9, stop_token_ids=[expected[0][3]], ignore_eos=True)
    for [(batch, _)] in rank_pools.run(2, pipeline_tasks.generate, "llama", BATCH, options, None, 1):
        for row, tokens in zip(batch.generations, expected, strict=True):
            end = tokens.index(expected[0][3]) + 1 if expected[0][3] in tokens else 9
            assert row.new_token_ids == tokens[:end]


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_and_memory_are_what_the_formulas_say(rank_pools: RankPools, size: int) -> None:
    num_tokens, num_new = 72, 5
    ranks = rank_pools.run(size, pipeline_tasks.prefill_each, "llama_deep", [prompt(num_tokens)], [12, 72], num_new)
    for chunk_tokens, *outcomes in zip([12, 72], *ranks, strict=True):
        sent = [outcome.kv_sent_bytes for outcome in outcomes]
        assert sent == [num_tokens * HIDDEN_BYTES] * (size - 1) + [0]
        assert [outcome.kv_received_bytes for outcome in outcomes] == sent[::-1]
        own = (num_tokens + num_new - 1) * DEEP_LAYERS // size * LAYER_BYTES
        passing = min(3, num_tokens // chunk_tokens) * chunk_tokens * HIDDEN_BYTES
        assert [outcome.kv_peak_bytes for outcome in outcomes] == [own + passing] * size


@pytest.mark.parametrize("wrong", ["layers", "hidden states"])
def test_stages_that_are_joined_wrongly_are_found(rank_pools: RankPools, wrong: str) -> None:
    for told in rank_pools.run(2, pipeline_tasks.joined_wrongly, wrong):
        assert "gives other logits where ranks have some of its layers" in told


@pytest.mark.parametrize("chunk_tokens", [None, 400])
def test_chunks_alone_bound_what_is_computed_at_a_time(rank_pools: RankPools, chunk_tokens: int | None) -> None:
    """With 300 tokens a whole model would compute blocks of rows, and compare them first."""
    ids = prompt(300)
    options = GenerationOptions(max_new_tokens=3, ignore_eos=True)
    for [(batch, _)] in rank_pools.run(2, pipeline_tasks.generate, "llama", [ids], options, chunk_tokens, 1):
        assert batch.generations[0].new_token_ids == oracle_tokens("llama", tuple(ids), 3)
        assert len(batch.boundaries) == (3 if chunk_tokens is None else 2)
        assert all(rank.row_tokens is None for rank in batch.ranks)


UNEVEN = [(0, 1, 30, 31, 70), (0, 40, 60, 60, 69, 70), (0, 69, 70), (0, 70)]
"""Boundaries of chunks of 70 tokens: one token long, empty, ever shorter, one alone."""


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("size", [2, 3])
def test_chunks_of_any_lengths_equal_transformers(rank_pools: RankPools, family: str, size: int) -> None:
    prompts = [prompt(70), prompt(52, seed=1)]
    expected = [oracle_logits(family, tuple(ids), torch.float64) for ids in prompts]
    for outcome in rank_pools.run(size, pipeline_tasks.prefill_in, family, prompts, UNEVEN)[-1]:
        for ours, theirs in zip(outcome.logits, expected, strict=True):
            assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("size", [2, 3])
def test_partition_auto_searches_the_chunks(rank_pools: RankPools, tmp_path: Path, size: int) -> None:
    """The chunks are those of a search over the whole model's layers, and the next run has them from the file."""
    prompts = [prompt(300), prompt(480, seed=1), prompt(300, seed=2), prompt(5)]
    first, *others = rank_pools.run(size, pipeline_tasks.generate_searched, "llama_deep", prompts, 3, tmp_path)
    assert first.tokens == [oracle_tokens("llama_deep", tuple(ids), 3) for ids in prompts]
    assert all((each.boundaries, each.tokens) == (first.boundaries, first.tokens) for each in others)
    cluster = first.cluster
    assert (cluster.num_ranks, cluster.compute.num_places) == (size, DEEP_LAYERS)

    def ttft_s(chunks: ContextPartition) -> float:
        return simulate_pipeline(chunks, size, cluster, activation_bytes=HIDDEN_BYTES).ttft_s

    for ids, boundaries in zip(prompts[:2], first.boundaries, strict=False):
        found = ttft_s(ContextPartition(boundaries=tuple(boundaries)))
        assert all(found <= ttft_s(even(len(ids), number)) for number in (1, 2, 4, 8))
    assert first.boundaries[2] == first.boundaries[0] and first.boundaries[3] == [0, 5]
    [path] = tmp_path.rglob("*.json")
    assert first.told == [f"partition=auto: timed a few layers for the first split; kept in {path}"]
    again, *_ = rank_pools.run(size, pipeline_tasks.generate_searched, "llama_deep", prompts[:1], 3, tmp_path)
    assert again.told == [] and again.boundaries == first.boundaries[:1]


@pytest.mark.parametrize(
    ("options", "chunks", "splits"),
    [({}, None, "AutoPartition"), ({"chunk_tokens": 100}, 5, "function"), ({"partition": "even"}, 3, "function")],
)
def test_what_chooses_the_chunks_of_a_run(
    rank_pools: RankPools, tmp_path: Path, options: dict[str, Any], chunks: int | None, splits: str
) -> None:
    """Layers are timed only where the chunks are searched."""
    model = ModelOptions(name=ModelName.random, config=str(save_tiny_config(tmp_path)))
    run = RunOptions(
        model=model,
        policy={"name": "full", "positions": "original"},
        prefill=PrefillOptions(name=PrefillName.pipeline, chunk_tokens=options.get("chunk_tokens")),
        partition=PartitionOptions(name=PartitionName[options.get("partition", "auto")]),
    )
    for boundaries, kind in rank_pools.run(2, pipeline_tasks.loaded, run):
        assert kind == splits and boundaries[-1] == 435
        assert chunks is None or ContextPartition(boundaries=tuple(boundaries)) == even(435, chunks)


def compared(
    rank_pools: RankPools, folder: Path, family: str, dtype: str, *, is_poor: bool = True, **config: Any
) -> list[tuple[str, bool, bool]]:
    """Answers of two ranks about a model: whether each compares its stage alone, and which compares all together."""
    build(family, **config).config.save_pretrained(folder)
    run = RunOptions(
        model=ModelOptions(name=ModelName.random, config=str(folder), dtype=DType[dtype]),
        policy={"name": "full", "positions": "original"},
        prefill=PrefillOptions(name=PrefillName.pipeline),
    )
    found: list[tuple[str, bool, bool]] = rank_pools.run(2, pipeline_tasks.compared, run, is_poor)
    return found


def test_stages_in_16_bits_are_compared_together_alone(rank_pools: RankPools, tmp_path: Path) -> None:
    """The last layers of SmolLM2, given embeddings, are off by a quarter of their spread in bfloat16."""
    assert compared(rank_pools, tmp_path, "llama", "bfloat16") == [("fine", False, False), ("fine", False, True)]
    assert all("off by rounding" in said for said, *_ in compared(rank_pools, tmp_path, "llama", "float32"))


@pytest.mark.parametrize(("family", "config"), [("mixtral", {}), ("deepseek_v3", {"first_k_dense_replace": 2})])
def test_each_stage_of_a_mixture_of_experts_is_compared_alone(
    rank_pools: RankPools, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """Logits of all stages do not tell, as in 16 bits rounding exchanges experts. The second has them in one stage."""
    for said, alone, _ in compared(rank_pools, tmp_path, family, "bfloat16", **config):
        assert "off by rounding" in said and alone
    found = compared(rank_pools, tmp_path, family, "bfloat16", is_poor=False, **config)
    assert found == [("fine", True, False)] * 2


@pytest.mark.parametrize(
    ("chunk_tokens", "told"), [(None, []), (100, ["partition=even has no effect with prefill.chunk_tokens"])]
)
def test_a_partition_beside_the_length_of_the_chunks_is_told(chunk_tokens: int | None, told: list[str]) -> None:
    run = RunOptions(
        policy={"name": "full", "positions": "original"},
        prefill=PrefillOptions(name=PrefillName.pipeline, chunk_tokens=chunk_tokens),
        partition=PartitionOptions(name=PartitionName.even),
    )
    assert ineffective_settings(run) == told


@pytest.mark.parametrize("partition", ["ratios", "table"])
def test_a_partition_by_rank_is_refused(partition: str) -> None:
    of = {"ratios": {"ratios": [0.6, 0.4]}, "table": {"table": "mine.json"}}
    with pytest.raises(ValueError, match=f"partition={partition} gives each rank a chunk of the prompt, and with"):
        RunOptions(
            policy={"name": "full", "positions": "original"},
            prefill=PrefillOptions(name=PrefillName.pipeline),
            partition=PartitionOptions(name=PartitionName[partition], **of[partition]),
        )
