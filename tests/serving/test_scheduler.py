"""The scheduler on live ranks: the same answers alone and in a batch, rows that are cancelled; predicted times."""

from __future__ import annotations

import pytest

from runahead import GenerationOptions
from runahead.serving.estimate import TimeEstimate
from tests.conftest import RankPools
from tests.families import prompt
from tests.serving import rank_tasks

PROMPTS = [prompt(40, seed=1), prompt(31, seed=2), prompt(36, seed=3)]
OPTIONS = [
    GenerationOptions(max_new_tokens=9, ignore_eos=True),
    GenerationOptions(max_new_tokens=4, ignore_eos=True, do_sample=True, temperature=2.0, seed=7),
    GenerationOptions(max_new_tokens=12, ignore_eos=True, repetition_penalty=3.0),
]


@pytest.mark.parametrize("size", [1, 2])
def test_an_answer_is_the_same_alone_and_in_a_batch(rank_pools: RankPools, size: int) -> None:
    alone, heard, num_alone = rank_pools.run(size, rank_tasks.serve, PROMPTS, OPTIONS, 1)[0]
    together, _, num_together = rank_pools.run(size, rank_tasks.serve, PROMPTS, OPTIONS, 3)[0]
    assert (num_alone, num_together) == (3, 1)
    assert alone == together
    assert [len(row) for row in alone] == [9, 4, 12]
    assert heard == [["start", "end"]] * 3


@pytest.mark.parametrize(("size", "num_shares"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_cancelled_rows_end_after_the_next_step_on_all_ranks(rank_pools: RankPools, size: int, num_shares: int) -> None:
    by_rank = rank_pools.run(size, rank_tasks.cancel_rows, num_shares, PROMPTS, OPTIONS, {0: 3, 2: 5})
    assert all(outcome == by_rank[0] for outcome in by_rank)
    cancelled, whole = by_rank[0][:3], by_rank[0][3:]
    assert [reason for _, reason in cancelled] == ["cancelled", "length", "cancelled"]
    assert [len(ids) for ids, _ in cancelled] == [4, 4, 6]
    assert [len(ids) for ids, _ in whole] == [9, 4, 12]
    for (ids, _), (all_ids, _) in zip(cancelled, whole, strict=True):
        assert ids == all_ids[: len(ids)]


def test_the_estimate_finds_the_constants_of_what_it_has_seen() -> None:
    estimate = TimeEstimate()
    assert estimate.prefill_s([1000]) == 0
    for length in (100, 3000, 700, 8000):
        estimate.learn([length, length], 2 * (2e-3 * length + 1e-6 * length**2), 0.05, [11, 31])
    assert estimate.constants == pytest.approx((2e-3, 1e-6), rel=1e-6)
    assert estimate.prefill_s([2000]) == pytest.approx(8.0)
    assert estimate.decoding_s(1000) == pytest.approx(20 * 0.05)
    assert estimate.decoding_s(5) == pytest.approx(4 * 0.05)


@pytest.mark.parametrize("seconds", [{100: 1.0, 1000: 2.0}, {100: 0.01, 1000: 100.0}, {500: 1.0}])
def test_an_estimate_is_never_negative(seconds: dict[int, float]) -> None:
    estimate = TimeEstimate()
    for length, ttft_s in seconds.items():
        estimate.learn([length], ttft_s, None, [1])
    assert min(estimate.constants) >= 0 < max(estimate.constants)
    assert all(estimate.prefill_s([length]) > 0 for length in (1, 100, 10_000))
