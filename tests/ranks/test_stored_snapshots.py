"""Hybrid models with a prefix tree in a chain: the last stage sends the first one the states of the last snapshot."""

from __future__ import annotations

from itertools import product

import pytest

from runahead import PrefillOptions
from tests.conftest import RankPools
from tests.families import HYBRIDS
from tests.ranks import snapshot_tasks, state_tasks
from tests.ranks.prefix_tasks import Split
from tests.ranks.test_stored_prefix import WAYS, counts
from tests.reuse.test_prefixes import require_same

FAST = ["qwen3_next", "lfm2", "mamba2"]
WINDOWS = ("lfm3",)
"""Families of whose prompts the last stage has not all that it would store of a prompt that all stages compute."""
OTHERS = [each for each in HYBRIDS if each not in (*FAST, *WINDOWS)]
FAMILIES = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("size", "prefill"),
    list(product((2, 3), WAYS)),
    ids=lambda each: each if isinstance(each, int) else f"{each.transfer.name}, {each.carrier.name}",
)
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
    # The third batch has a row without a snapshot and one that would be padded, so nothing of it is reused.
    assert [counts(each) for each in turns.ours] == [(60, 0), (9, 60), (67, 0), (7, 100), (59, 0)]


def test_a_snapshot_is_kept_where_the_last_stage_begins(rank_pools: RankPools) -> None:
    """With snapshots inside prompts; a prompt that the last stage computes alone has them after every so many."""
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(ratios=(0.75, 0.25)), WAYS[0], 16)[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert counts(turns.ours[-1]) == (59 - 50, 50), "of 67 tokens the last stage begins with number 50"
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(short=60), WAYS[0], 16)[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert counts(turns.ours[-1]) == (59 - 48, 48)


@pytest.mark.parametrize("fault", ["nothing", "of other rows"])
def test_states_that_the_first_stage_does_not_get_show(rank_pools: RankPools, fault: str) -> None:
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(), WAYS[0], 0, fault)[-1]
    with pytest.raises(AssertionError):
        require_same(turns.ours[3], turns.theirs[3])


def test_the_bytes_of_states_are_sent_once(rank_pools: RankPools) -> None:
    """To the first stage, with keys and values of all layers but the last; and to the second one what is handed on."""
    turns = rank_pools.run(2, snapshot_tasks.in_turn, "qwen3_next", Split(), WAYS[0], 0)[-1]
    kv, states = rank_pools.run(1, state_tasks.bytes_of, "qwen3_next")[0]
    sent = [report.kv_sent_bytes for report in turns.ours[1].ranks]
    assert sent == [states + 4 * kv, states + 60 * kv // 2]


def test_the_host_waits_for_its_device_at_keys_and_values_alone(rank_pools: RankPools) -> None:
    """It did at states, too, which ask the device for nothing: twice at each of two."""
    first, last = rank_pools.run(2, snapshot_tasks.waits_for_the_device, WAYS[0])
    assert first[0] == 0 and last[0] <= 1, "once, before keys and values that the last stage sends ahead"
    assert min(first[1], last[1]) > 2
