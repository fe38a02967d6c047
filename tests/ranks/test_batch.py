"""Several prompts at once are what they are one by one; each row ends by itself, and nothing is left behind."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import Phase, given, seed, settings

from policies.base import Policy
from policies.infinigen import InfiniGen
from policies.snapkv import SnapKV
from runahead import GenerationOptions, PrefillOptions
from runahead.config import Speculate, Transfer
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import ROPE_THRESHOLD, largest_difference, oracle_logits, oracle_tokens, prompt
from tests.partitions import boundaries
from tests.ranks import tasks
from tests.ranks.test_exactness import TOLERANCE

NUM_NEW = 8
BATCH = [prompt(70, seed=1), prompt(ROPE_THRESHOLD - NUM_NEW + 1, seed=2), prompt(1, seed=3), prompt(52, seed=4)]
"""With the new tokens two prompts stay below the length where LongRoPE changes, and two begin beyond it."""

LONGEST = len(BATCH[0])

FAMILIES = [
    "llama",
    "phi3_longrope",
    "llama_dynamic_ntk",
    "mistral",
    "gemma2",
    "gemma3_text",
    "llama4_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "jetmoe",
    "opt",
    "gpt2",
    "gpt_bigcode",
    "falcon",
    "falcon_alibi",
    "bloom",
    "mpt",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("examples", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.sampled(6)
def test_logits_of_every_row_equal_transformers_on_that_prompt_alone(
    rank_pools: RankPools, family: str, size: int, examples: int
) -> None:
    @seed(zlib.crc32(f"{size} {family}".encode()))
    @settings(max_examples=1 if size == 1 else examples, phases=[Phase.generate])
    @given(bounds=boundaries(LONGEST, size))
    def check(bounds: tuple[int, ...]) -> None:
        for transfer in Transfer:
            options = PrefillOptions(transfer=transfer)
            outcomes = rank_pools.run(size, tasks.prefill, family, BATCH, bounds, options)
            (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
            for ids, ours in zip(BATCH, logits, strict=True):
                assert largest_difference(ours, oracle_logits(family, tuple(ids))) < TOLERANCE, (bounds, transfer)

    check()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "bounds"), [(1, (0, 70)), (2, (0, 25, 70)), (3, (0, 17, 69, 70))])
@pytest.mark.sampled(6)
def test_tokens_of_every_row_equal_generate_on_that_prompt_alone(
    rank_pools: RankPools, family: str, size: int, bounds: tuple[int, ...]
) -> None:
    options = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
    for batch, _ in rank_pools.run(size, tasks.generate, family, BATCH, options, bounds):
        for ids, generation in zip(BATCH, batch.generations, strict=True):
            assert generation.new_token_ids == oracle_tokens(family, tuple(ids), NUM_NEW)
            assert generation.prompt_tokens == len(ids)


def _ends(num_new: int) -> tuple[list[int], list[list[int]]]:
    """Tokens to end rows of llama's with, so that two rows end early at different steps; and all rows' tokens then."""
    rows = [oracle_tokens("llama", tuple(ids), num_new) for ids in BATCH]
    for eos in product(rows[0][2:], rows[3][2:]):
        ended = [next((row[: i + 1] for i, token in enumerate(row) if token in eos), row) for row in rows]
        first, second, *others = sorted(map(len, ended))
        if 1 < first < second < num_new and others == [num_new, num_new]:
            return list(eos), ended
    raise AssertionError("no two tokens end the rows as wanted; take other prompts")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_stops_by_itself(rank_pools: RankPools, size: int) -> None:
    eos, expected = _ends(10)
    for batch, _ in rank_pools.run(
        size, tasks.generate, "llama", BATCH, GenerationOptions(max_new_tokens=10), None, None, 0, eos
    ):
        assert [row.new_token_ids for row in batch.generations] == expected
        reasons = ["eos" if len(ids) < 10 else "length" for ids in expected]
        assert [row.finish_reason for row in batch.generations] == reasons


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_rank_0_is_told_tokens_step_by_step_with_none_for_ended_rows(rank_pools: RankPools, size: int) -> None:
    eos, expected = _ends(10)
    options = GenerationOptions(max_new_tokens=10)
    results = rank_pools.run(size, tasks.generate, "llama", BATCH, options, None, None, 0, eos)
    (_, steps), *others = results
    assert len(steps) == max(map(len, expected))  # all rows ended: no step more
    told = [[token for token in column if token is not None] for column in zip(*steps, strict=True)]
    assert told == expected
    for row, ids in enumerate(expected):
        assert [step[row] is None for step in steps] == [i >= len(ids) for i in range(len(steps))]
    assert all(steps == [] for _, steps in others)


def test_rank_0_is_told_tokens_when_it_decodes_itself_and_when_it_is_idle(rank_pools: RankPools) -> None:
    expected = oracle_tokens("llama", tuple(BATCH[0]), 4)
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
    for bounds in ((0, 70, 70, 70), (0, 0, 0, 70), (0, 0, 70, 70)):
        (_, steps), *_ = rank_pools.run(3, tasks.generate, "llama", [BATCH[0]], options, bounds)
        assert steps == [[token] for token in expected]


@pytest.mark.parametrize(
    ("drafter", "bounds"),
    [
        (None, (0, 25, 60)),
        (SnapKV(budget=16, window=4, kernel=3), (0, 25, 60)),
        (SnapKV(budget=16, window=4, kernel=3), (0, 59, 60)),
        (InfiniGen(min_tokens=0, sinks=1, recent=2, fetch=0.3, skew="none", observed=8), (0, 59, 60)),
    ],
    ids=["lookup", "snapkv", "snapkv over one token", "infinigen over one token"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_change_no_token_behind_a_chain(
    rank_pools: RankPools, family: str, drafter: Policy | None, bounds: tuple[int, ...]
) -> None:
    """The last rank alone drafts and decodes, over windows of what it received, and rank 0 hears of every token.

    A policy chooses what drafts see by the last tokens that can be computed again over these windows.
    """
    prompts = [prompt(6, seed=1) * 10, prompt(5, seed=2) * 8]
    options = GenerationOptions(
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        speculate=Speculate.lookup if drafter is None else Speculate.policy,
        speculate_match=1,
        speculate_always=True,
    )
    draft = None if drafter is None else RankPolicies.everywhere([drafter])
    run = partial(tasks.generate, draft=draft)
    (batch, steps), *others = rank_pools.run(2, run, family, prompts, options, bounds)
    expected = [oracle_tokens(family, tuple(ids), NUM_NEW) for ids in prompts]
    told = [[token for token in column if token is not None] for column in zip(*steps, strict=True)]
    assert told == [each.new_token_ids for each in batch.generations] == expected
    assert all(other.generations == batch.generations and not heard for other, heard in others)
    assert batch.ranks[0].speculation is None and batch.ranks[1].speculation is not None
    assert batch.ranks[1].speculation.drafted > 0


@pytest.mark.parametrize("size", [1, 2])
def test_stop_string_ends_its_row_only(rank_pools: RankPools, size: int) -> None:
    rows = [oracle_tokens("llama", tuple(ids), NUM_NEW) for ids in BATCH]
    letters = tasks.Letters()
    stop = letters.decode(rows[1][3:5])
    options = GenerationOptions(max_new_tokens=NUM_NEW, stop=[stop], ignore_eos=True)
    assert all(stop not in letters.decode(row) for row in (rows[0], rows[2], rows[3]))
    for batch, _ in rank_pools.run(size, tasks.generate, "llama", BATCH, options):
        assert [row.finish_reason for row in batch.generations] == ["length", "stop", "length", "length"]
        assert batch.generations[1].new_token_ids == rows[1][:5]
        assert batch.generations[1].text == letters.decode(rows[1][:3])
        assert batch.generations[0].text == letters.decode(rows[0])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sampled_row_is_drawn_as_that_prompt_alone(rank_pools: RankPools, size: int) -> None:
    options = GenerationOptions(max_new_tokens=12, do_sample=True, seed=5, top_k=20, ignore_eos=True)
    batch = rank_pools.run(size, tasks.generate, "llama", BATCH, options)[0][0]
    for index, ids in enumerate(BATCH):
        alone = rank_pools.run(size, tasks.generate, "llama", [ids], options, None, None, index)[0][0]
        assert batch.generations[index].new_token_ids == alone.generations[0].new_token_ids


def test_seed_decides_what_is_drawn(rank_pools: RankPools) -> None:
    options = GenerationOptions(max_new_tokens=12, do_sample=True, seed=5, ignore_eos=True)

    def drawn(options: GenerationOptions) -> list[list[int]]:
        batch = rank_pools.run(2, tasks.generate, "llama", [BATCH[0], BATCH[0]], options)[0][0]
        return [row.new_token_ids for row in batch.generations]

    first = drawn(options)
    assert first == drawn(options)
    assert first[0] != first[1]  # rows with the same prompt do not draw the same
    assert first[0] != drawn(replace(options, seed=1000))[0]


def test_every_rank_gets_the_same_result(rank_pools: RankPools) -> None:
    options = GenerationOptions(max_new_tokens=6, do_sample=True, ignore_eos=True)
    (first, _), *others = rank_pools.run(3, tasks.generate, "mistral", BATCH, options, (0, 20, 40, 70))
    assert first.boundaries == [0, 20, 40, 70]
    assert [report.rank for report in first.ranks] == [0, 1, 2]
    assert [report.chunk_tokens for report in first.ranks] == [20, 20, 30]
    for other, _ in others:
        assert replace(other, warm=first.warm) == first


@pytest.mark.parametrize("family", ["llama", "phi3_longrope", "llama_dynamic_ntk", "gemma3_text", "bloom"])
def test_calls_in_a_row_do_not_influence_each_other(rank_pools: RankPools, family: str) -> None:
    options = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
    for prompts in ([BATCH[0]], [BATCH[1]], BATCH, [BATCH[2]], BATCH[::-1], [BATCH[1]], [BATCH[0]]):
        batch = rank_pools.run(2, tasks.generate, family, prompts, options)[0][0]
        expected = [oracle_tokens(family, tuple(ids), NUM_NEW) for ids in prompts]
        assert [row.new_token_ids for row in batch.generations] == expected


@pytest.mark.parametrize("family", ["llama", "phi3_longrope", "llama_dynamic_ntk", "gemma3_text", "bloom"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.sampled(6)
def test_memory_stays_flat_over_many_calls(rank_pools: RankPools, family: str, size: int) -> None:
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
    batches = [[prompt(60, seed=1)], [prompt(20, seed=2), prompt(50, seed=3)]]
    one_layer_bytes = 60 * 2 * 2 * 8 * 8  # K,V of 2 heads of 8 float64: the least that a call could leave behind
    for early, late in rank_pools.run(size, tasks.footprints_over_calls, family, batches, options, [2, 20]):
        # Two rounds fill what is cached for good; the last control message, 2 kB, may be alive at either time.
        assert late.tensor_bytes - early.tensor_bytes < one_layer_bytes / 2
        assert late.num_threads == early.num_threads


@pytest.mark.parametrize(
    ("family", "right"),
    [
        ("bart", [[prompt(40, 1), prompt(40, 2)]]),  # takes no position ids: prompts of one length only
        # scales queries from token 8 of the padded batch on: also others that end before it
        ("llama4_text_tempered", [[prompt(40, 1), prompt(40, 2)], [prompt(5, 1), prompt(3, 2)]]),
    ],
)
def test_prompts_of_different_lengths_are_refused_where_positions_cannot_be_right(
    rank_pools: RankPools, family: str, right: list[list[list[int]]]
) -> None:
    options = GenerationOptions(max_new_tokens=2, ignore_eos=True)
    with pytest.raises(RuntimeError, match="counts positions from the start of the longest prompt"):
        rank_pools.run(1, tasks.generate, family, BATCH, options)
    for prompts in right:
        batch = rank_pools.run(1, tasks.generate, family, prompts, options)[0][0]
        expected = [oracle_tokens(family, tuple(ids), 2) for ids in prompts]
        assert [row.new_token_ids for row in batch.generations] == expected
