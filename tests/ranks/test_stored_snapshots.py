"""Hybrid models with a prefix tree in a chain: the last stage sends the first one the states of the last snapshot."""

from __future__ import annotations

from functools import partial

import pytest

from runahead import PrefillOptions
from tests.conftest import RankPools
from tests.families import HYBRIDS
from tests.ranks import snapshot_tasks, state_tasks
from tests.ranks.prefix_tasks import Split, Turns
from tests.ranks.test_stored_prefix import WAYS, chains, counts
from tests.reuse.test_prefixes import require_same
from tests.reuse.test_snapshots import KnownStates

FAST = ["qwen3_next", "lfm2", "mamba2"]
WINDOWS = ("lfm3",)
"""Families of whose prompts the last stage has not all that it would store of a prompt that all stages compute."""
OTHERS = [each for each in HYBRIDS if each not in (*FAST, *WINDOWS)]
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]


@pytest.mark.parametrize("family", FAMILIES)
@chains()
@pytest.mark.sampled(5)
def test_a_chain_goes_on_after_the_last_snapshot(
    rank_pools: RankPools, family: str, size: int, prefill: PrefillOptions
) -> None:
    by_rank = rank_pools.run(size, snapshot_tasks.in_turn, family, Split(), prefill, 0)
    assert [each.num_held for each in by_rank] == [0] * size
    turns = by_rank[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
        assert all(report.chunk_tokens > 0 for report in ours.ranks)
    # The third batch has a row without a snapshot and one that is padded, which begins from a state all the same.
    assert [counts(each) for each in turns.ours] == [(60, 0), (9, 60), (40, 60), (7, 100), (59, 0)]


def expected_counts(snapshot_tokens: int, turns: Turns) -> list[tuple[int, int]]:
    """What is computed and reused if each prompt is computed from the last snapshot on."""
    known, found = KnownStates(snapshot_tokens), list[tuple[int, int]]()
    for prompts, batch in zip(snapshot_tasks.branching(), turns.ours, strict=True):
        reused = [known.reused(ids) for ids in prompts]
        found.append((max(len(ids) - num for ids, num in zip(prompts, reused, strict=True)), sum(reused)))
        for ids, row in zip(prompts, batch.generations, strict=True):
            known.add(ids, row.new_token_ids)
    return found


SPLITS = {
    "even": Split(),
    "where a stage ends": Split(ratios=(32 / 90, 58 / 90), short_ratios=(0.5, 0.5)),
    "most on the last": Split(ratios=(0.1, 0.9)),
    "alone": Split(short=60),
}


@pytest.mark.parametrize("family", FAMILIES)
@chains()
@pytest.mark.sampled(5)
def test_a_branch_begins_after_the_last_snapshot_inside_a_chunk(
    rank_pools: RankPools, family: str, size: int, prefill: PrefillOptions
) -> None:
    """As one stage would: in padded batches, too, whatever stage has computed the tokens before it."""
    turns = rank_pools.run(size, partial(snapshot_tasks.in_turn, branches=True), family, Split(), prefill, 16)[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    found = [counts(each) for each in turns.ours]
    assert found == expected_counts(16, turns) and [num for _, num in found] == [0, 64, 64, 106, 48]


@pytest.mark.parametrize("split", SPLITS)
def test_snapshots_are_at_the_same_places_however_a_prompt_is_split(rank_pools: RankPools, split: str) -> None:
    task = partial(snapshot_tasks.in_turn, branches=True)
    turns = rank_pools.run(2, task, "qwen3_next", SPLITS[split], WAYS[0], 16)[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [counts(each) for each in turns.ours] == expected_counts(16, turns)


@pytest.mark.parametrize("num_kept", [0, 5, 12])
def test_a_chain_keeps_no_more_states_than_the_tree_may_take(rank_pools: RankPools, num_kept: int) -> None:
    """The last ones of both rows, as in one stage: of 40 tokens and of 37 after 3 of padding."""
    ends = {(at, 0) for at in range(4, 40, 4)} | {(3 + at, 1) for at in range(4, 37, 4)}
    [first, last] = rank_pools.run(2, snapshot_tasks.kept, "qwen3_next", 4, num_kept + 0.5)
    assert (first, last) == (set(), set(sorted(ends)[len(ends) - num_kept :]))


@pytest.mark.parametrize("fault", ["nothing", "of other rows"])
def test_states_that_the_first_stage_does_not_get_show(rank_pools: RankPools, fault: str) -> None:
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(), WAYS[0], 0, fault)[-1]
    with pytest.raises(AssertionError):
        require_same(turns.ours[3], turns.theirs[3])


@pytest.mark.parametrize(("fault", "batch"), [("of the first stop", 2), ("of padding", 2)])
def test_states_that_are_kept_in_a_wrong_way_show(rank_pools: RankPools, fault: str, batch: int) -> None:
    task = partial(snapshot_tasks.in_turn, branches=True)
    turns = rank_pools.run(2, task, "qwen3_next", Split(), WAYS[0], 16, fault)[-1]
    with pytest.raises(AssertionError):
        require_same(turns.ours[batch], turns.theirs[batch])


def test_the_bytes_of_states_are_sent_once(rank_pools: RankPools) -> None:
    """To the first stage, with keys and values of all layers but the last; and to the second one what is handed on."""
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(), WAYS[0], 0)[-1]
    kv, states = rank_pools.run(1, state_tasks.bytes_of, "qwen3_next")[0]
    sent = [report.kv_sent_bytes for report in turns.ours[1].ranks]
    assert sent == [states + 4 * kv, states + 60 * kv // 2]


def test_the_bytes_of_states_inside_chunks_are_sent_once(rank_pools: RankPools) -> None:
    """Of 90 tokens and of 50 after 40 of padding, 45 on each of two stages; the last one keeps its own."""
    task = partial(snapshot_tasks.in_turn, branches=True)
    kv, states = rank_pools.run(1, state_tasks.bytes_of, "qwen3_next")[0]
    for step, kept in ((0, 0), (16, 2), (4, 12)):  # of the first row the 11 to token 44, of the second that after 4
        turns = rank_pools.run(2, task, "qwen3_next", Split(), WAYS[0], step)[-1]
        lanes = 2 * -(-kept // 2)
        assert [report.kv_sent_bytes for report in turns.ours[0].ranks] == [(2 + lanes) * states + 2 * 45 * kv, 0]


def test_the_host_waits_for_its_device_at_keys_and_values_alone(rank_pools: RankPools) -> None:
    """It did at states, too, which ask the device for nothing: twice at each of two."""
    first, last = rank_pools.run(2, snapshot_tasks.waits_for_the_device, WAYS[0])
    assert first[0] == 0 and last[0] <= 1, "once, before keys and values that the last stage sends ahead"
    assert min(first[1], last[1]) > 2
