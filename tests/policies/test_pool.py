"""Who goes when the pool is full: as many as are due, nobody twice, nobody who is pinned or gone already."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.pool import SATURATED, Pool, Victim, note_choice, victims
from tests.examples import examples


@given(
    seed=st.integers(0, 1000),
    num_slots=st.integers(8, 30),
    pad=st.integers(0, 4),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 2),
    count=st.integers(1, 4),
    victim=st.sampled_from(Victim),
)
@examples(150)
def test_victims_are_those_used_least_and_never_pinned(
    seed: int, num_slots: int, pad: int, sinks: int, recent: int, count: int, victim: Victim
) -> None:
    """Against a plain sort, slot by slot."""
    generator = torch.manual_seed(seed)
    length = 50
    tokens = torch.stack([torch.randperm(length, generator=generator)[: num_slots - pad] for _ in range(2)])
    positions_BKn = torch.cat([torch.arange(-pad, 0).expand(2, -1), tokens], dim=1)[None]
    use_BKn = torch.randint(0, 4, (1, 2, num_slots), generator=generator, dtype=torch.int32)
    keep_from_B = torch.tensor([length - recent])
    found = victims(victim, use_BKn, positions_BKn, count, sinks=sinks, keep_from_B=keep_from_B)
    for head, slots in enumerate(found[0].tolist()):
        positions, use = positions_BKn[0, head].tolist(), use_BKn[0, head].tolist()
        free = [slot for slot in range(num_slots) if positions[slot] < 0 or sinks <= positions[slot] < length - recent]
        ranked = [(0 if victim is Victim.fifo else use[slot], positions[slot], slot) for slot in free]
        padding = sorted((slot for slot in free if positions[slot] < 0), reverse=True)
        expected = padding + [slot for _, position, slot in sorted(ranked) if position >= 0]
        assert slots == expected[:count]


def test_least_recently_chosen_goes_first() -> None:
    use_BKn = torch.zeros(1, 1, 5, dtype=torch.int32)
    for step, slots in enumerate(([0, 1, 2, 3, 4], [4, 1], [0, 2, 3], [1]), start=1):
        note_choice(Victim.lru, use_BKn, torch.tensor([[slots]]), step)
    assert use_BKn.tolist() == [[[3, 4, 3, 3, 2]]]
    order = victims(Victim.lru, use_BKn, torch.arange(5)[None, None], 5, sinks=0, keep_from_B=torch.tensor([5]))
    assert order.tolist() == [[[4, 0, 2, 3, 1]]]


def test_counters_are_halved_where_one_saturates() -> None:
    use_BKn = torch.tensor([[[SATURATED - 2, 100, 7], [3, 2, 1]]], dtype=torch.int32)
    chosen = torch.tensor([[[0, 1], [0, 1]]])
    note_choice(Victim.counter, use_BKn, chosen, 1)
    assert use_BKn.tolist() == [[[SATURATED - 1, 101, 7], [4, 3, 1]]]
    note_choice(Victim.counter, use_BKn, chosen, 2)
    assert use_BKn.tolist() == [[[SATURATED // 2, 51, 3], [5, 4, 1]]]


def test_what_was_never_chosen_does_not_count_for_fifo() -> None:
    use_BKn = torch.zeros(1, 1, 3, dtype=torch.int32)
    note_choice(Victim.fifo, use_BKn, torch.tensor([[[0, 1]]]), 1)
    assert not use_BKn.any()


def test_a_pool_in_which_all_is_pinned_is_an_invariant_broken() -> None:
    use_BKn, keep_from_B = torch.zeros(1, 1, 3), torch.tensor([3])
    with pytest.raises(RuntimeError, match="no slot may go"):
        victims(Victim.fifo, use_BKn, torch.arange(3)[None, None], 1, sinks=3, keep_from_B=keep_from_B)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("3k", 3072), ("1.5KiB", 1536), (77, 77), ("8B", 8)],
)
def test_sizes(text: object, expected: int) -> None:
    assert Pool(bytes=text).bytes == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 GiB 3", "0.1", "1e9", "inf", True, [1], "2PiB"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is no size in bytes above 0; write 2GiB"):
        Pool(bytes=text)
