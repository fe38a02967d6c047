"""Speculation on ranks that decode together, with parts of the text or of the model: one leads, no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from policies.h2o import H2O
from policies.quest import Quest
from policies.snapkv import SnapKV
from runahead import GenerationOptions
from runahead.config import DecodeName, PrefillName, Speculate
from runahead.report import SpeculationReport
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import prompt
from tests.ranks import draft_tasks

BATCH = [prompt(41, seed=1), prompt(26, seed=2), prompt(1, seed=3)]
"""Rows; a rank has no token at all of some."""

PLAIN = [GenerationOptions(max_new_tokens=num, ignore_eos=True) for num in (30, 19, 25)]
SAMPLED = [replace(each, do_sample=True, temperature=1.4, seed=row) for row, each in enumerate(PLAIN)]
SHARDED: dict[str, Any] = {"decode": DecodeName.sharded}
TENSOR: dict[str, Any] = {"prefill": PrefillName.tensor, "num_shares": 2}
SHARED: dict[str, Any] = {"prefill": PrefillName.single, "num_shares": 2}


def drafted(options: GenerationOptions, kind: Speculate = Speculate.lookup) -> GenerationOptions:
    return replace(options, speculate=kind, speculate_tokens=4, speculate_match=1)


def compare(
    rank_pools: RankPools,
    size: int,
    bounds: tuple[int, ...],
    options: Sequence[GenerationOptions],
    *,
    kind: Speculate = Speculate.lookup,
    family: str = "llama",
    **ways: Any,
) -> tuple[SpeculationReport, int]:
    """Generate without drafts and with them, and compare what every rank has. Returns the report and the replays."""
    prompts, run = BATCH[: len(options)], partial(draft_tasks.drafted, **ways)
    plain = rank_pools.run(size, run, family, prompts, list(options), bounds)[0][0].generations
    texts = [ids + each.new_token_ids for ids, each in zip(prompts, plain, strict=True)]
    asked = [drafted(each, kind) for each in options]
    known = texts if kind is Speculate.lookup else ()
    found = rank_pools.run(size, partial(run, known=known), family, prompts, asked, bounds)
    for batch, _, _ in found:
        assert [each.new_token_ids for each in batch.generations] == [each.new_token_ids for each in plain]
        assert [each.finish_reason for each in batch.generations] == [each.finish_reason for each in plain]
    batch, steps, num_replays = found[0]
    told = [[token for token in column if token is not None] for column in zip(*steps, strict=True)]
    assert told == [each.new_token_ids for each in plain]
    report = batch.ranks[size - ways.get("num_shares", 1)].speculation
    assert report is not None and report.verifications > 0
    return report, num_replays


@pytest.mark.parametrize("options", [PLAIN, SAMPLED, PLAIN[:1]], ids=["greedy", "sampled", "one row"])
@pytest.mark.parametrize(("size", "bounds"), [(2, (0, 25, 41)), (3, (0, 10, 40, 41))])
def test_ranks_that_store_parts_of_a_text(
    rank_pools: RankPools, size: int, bounds: tuple[int, ...], options: Sequence[GenerationOptions]
) -> None:
    """It fails where a rank verifies what its own clock says, or stores a token of a draft that another one has."""
    report, _ = compare(rank_pools, size, bounds, options, **SHARDED)
    assert 0 < report.accepted < report.drafted


@pytest.mark.parametrize("family", ["gemma2", "bloom", "gpt_oss", "mistral", "deepseek_v3"])
@pytest.mark.sampled(2)
def test_families_on_ranks_that_store_parts_of_a_text(rank_pools: RankPools, family: str) -> None:
    options = PLAIN if family != "bloom" else PLAIN[:1]
    assert compare(rank_pools, 3, (0, 10, 25, 41), options, family=family, **SHARDED)[0].accepted > 0


@pytest.mark.parametrize("options", [PLAIN, PLAIN[:1]], ids=["rows", "one row"])
def test_a_rank_that_is_told_tokens_gathers_in_layers_that_read_others(
    rank_pools: RankPools, options: Sequence[GenerationOptions]
) -> None:
    """It ends a forward with the last layer that attends, which is none that stores keys and values."""
    assert compare(rank_pools, 2, (0, 25, 41), options, family="gemma4_text", **SHARDED)[0].accepted > 0


@pytest.mark.parametrize("options", [PLAIN, PLAIN[:1]], ids=["rows", "one row"])
def test_graphs_are_replayed_between_drafts(rank_pools: RankPools, options: Sequence[GenerationOptions]) -> None:
    """The numbers of a graph on the device follow what is taken back on all ranks."""
    report, num_replays = compare(rank_pools, 2, (0, 25, 41), options, on_gpu=True, **SHARDED)
    assert report.accepted > 0 and num_replays > 0


@pytest.mark.parametrize("ways", [TENSOR, SHARED], ids=["prefill=tensor", "ranks.tensor"])
@pytest.mark.parametrize("options", [PLAIN, SAMPLED], ids=["greedy", "sampled"])
def test_ranks_that_share_a_model(
    rank_pools: RankPools, ways: dict[str, Any], options: Sequence[GenerationOptions]
) -> None:
    report, _ = compare(rank_pools, 2, (), options, **ways)
    assert 0 < report.accepted < report.drafted


def test_stages_of_several_ranks_that_store_parts_of_a_text(rank_pools: RankPools) -> None:
    compare(rank_pools, 4, (0, 25, 41), PLAIN, num_shares=2, **SHARDED)


@pytest.mark.parametrize("policy", [SnapKV(budget=12, window=4), H2O(budget=10, recent=3, evict_every=3)])
def test_ranks_that_share_a_model_under_a_policy(rank_pools: RankPools, policy: SnapKV | H2O) -> None:
    compare(rank_pools, 2, (), PLAIN, policies=RankPolicies.everywhere([policy]), **TENSOR)


@pytest.mark.parametrize("first", [None, "lookup"])
@pytest.mark.parametrize("policy", [SnapKV(budget=16, window=4), Quest(min_tokens=0, sinks=1, recent=2, page=2)])
def test_ranks_that_share_a_model_draft_together(
    rank_pools: RankPools, policy: SnapKV | Quest, first: str | None
) -> None:
    """A drafting forward needs all of them, whatever their clocks say of it and of the drafts for it."""
    by = RankPolicies.everywhere([policy])
    compare(rank_pools, 2, (), PLAIN, kind=Speculate.policy, by=by, first=first, **TENSOR)


def test_ranks_that_share_a_drafting_model_draft_together(rank_pools: RankPools) -> None:
    compare(rank_pools, 2, (), PLAIN, kind=Speculate.model, **TENSOR)


@pytest.mark.parametrize("bounds", [(0, 25, 41), (0, 40, 41)])
def test_a_smaller_model_on_the_last_rank_drafts_for_all(rank_pools: RankPools, bounds: tuple[int, ...]) -> None:
    compare(rank_pools, 2, bounds, PLAIN, kind=Speculate.model, **SHARDED)


def test_decode_auto_is_what_goes_with_the_drafts_of_every_row(rank_pools: RankPools) -> None:
    """A policy drafts on a stage that stores all, also for a row behind one whose drafts go with decode=sharded."""
    by = RankPolicies.everywhere([SnapKV(budget=16, window=4)])
    run, prompts, bounds = partial(draft_tasks.drafted, decode=DecodeName.auto, by=by), BATCH[:2], (0, 25, 41)
    asked = [drafted(PLAIN[0]), drafted(PLAIN[1], Speculate.policy)]
    plain, both = (rank_pools.run(2, run, "llama", prompts, each, bounds)[0][0] for each in (PLAIN[:2], asked))
    assert [each.new_token_ids for each in both.generations] == [each.new_token_ids for each in plain.generations]
    assert (plain.decode, both.decode) == ("sharded", "last")
    assert any("generation.speculate=policy does not go with decode=sharded" in each for each in both.slower)
