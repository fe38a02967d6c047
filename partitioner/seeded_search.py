"""Our search: start from a good guess, and move boundaries alone and together by shrinking strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from math import inf

from partitioner.chains import Chain, search_chains
from partitioner.evaluations import (
    Cost,
    Evaluations,
    OutOfEvaluations,
    SearchResult,
    Step,
    check_search,
    coarse_stride,
    on_grid,
)
from runahead.context import ContextPartition, even

Move = tuple[float, ...]
"""Of each inner boundary, in strides."""


def seeded_search(
    cost: Cost,
    num_tokens: int,
    num_ranks: int,
    *,
    min_stride: int,
    seed: ContextPartition | None = None,
    reach: int | None = None,
    max_evaluations: int | None = None,
    on_evaluation: Callable[[Step], None] | None = None,
) -> SearchResult:
    """The cheapest partition near a seed, by pattern search.

    At every stride each move is tried in both directions and repeated while it helps; when none helps, the stride
    halves. Moves of one boundary alone get stuck, since TTFT is about a maximum over ranks: to relieve one rank is to
    burden another. So boundaries also move in neighbouring pairs and all together. Last, ranks are
    left out, as `search_chains` says.

    Args:
        seed: equal work, or an interpolation of known entries; by default even chunks.
        min_stride: inner boundaries are multiples of it.
        reach: tokens by which a boundary may end up away from the seed, with all ranks at work; by default any. The
            first stride is half of it.
        max_evaluations: stop there with the best so far.
        on_evaluation: called after each evaluation.

    Raises:
        ValueError: numbers below 1, or a seed of another length or number of ranks.
    """
    check_search(num_tokens, num_ranks, min_stride)
    if reach is not None and reach < min_stride:
        raise ValueError(f"search.reach={reach} must be at least search.min_stride={min_stride}")
    seed = (seed or even(num_tokens, num_ranks)).check(num_tokens, num_ranks)
    evaluations = Evaluations(cost, max_evaluations=max_evaluations, on_evaluation=on_evaluation)
    start = on_grid(seed.boundaries, min_stride)
    farthest = num_tokens / (4 * num_ranks) if reach is None else reach / 2

    def descend(chain: Chain, boundaries: tuple[int, ...]) -> None:
        _PatternSearch(chain, boundaries, min_stride, reach).run(coarse_stride(farthest, min_stride))

    with suppress(OutOfEvaluations):
        if reach is None:
            search_chains(evaluations, start, min_stride, descend)
        else:  # a chunk that grows to fill another's place leaves the range
            descend(Chain(evaluations, list(range(num_ranks)), num_ranks), start)
    return evaluations.result()


class _PatternSearch:
    """Moves of the boundaries of one chain, from a start."""

    def __init__(self, chain: Chain, start: tuple[int, ...], min_stride: int, reach: int | None) -> None:
        self._chain, self._start, self._min_stride, self._reach = chain, start, min_stride, reach
        self._moves = list(_moves(len(start) - 2))
        self._best, self._best_s = start, inf

    def run(self, stride: int) -> None:
        evaluations = self._chain.evaluations
        evaluations.stride = stride
        self._best_s = self._chain(self._start)
        last = inf
        while True:
            helped = self._sweep(evaluations.stride)
            if helped and MODE & 1:
                continue
            if evaluations.stride > self._min_stride:
                evaluations.level, evaluations.stride = evaluations.level + 1, evaluations.stride // 2
            elif helped:
                pass
            elif MODE & 2 and last > self._best_s:
                last = self._best_s
                evaluations.stride = 2 * self._min_stride
            else:
                return

    def _sweep(self, stride: int) -> bool:
        """Try all moves; did any help?"""
        before = self._best_s
        for move in self._moves:
            for sign in (1, -1):
                helped = False
                while self._try(move, sign * stride):
                    helped = True
                    k = k + 1 if 'k' in dir() else 1
                    if k >= REP: break
                k = 0
                if helped:
                    break  # the other direction is where it came from
        return self._best_s < before

    def _try(self, move: Move, stride: int) -> bool:
        unit = self._min_stride
        inner = [b + round(part * stride / unit) * unit for b, part in zip(self._best[1:-1], move, strict=True)]
        boundaries = (0, *inner, self._best[-1])
        empties = any(a > b or a == b and c < d for (a, b), (c, d) in zip(pairwise(boundaries), pairwise(self._best), strict=True))
        if empties or not self._within_reach(boundaries):
            return False
        cost_s = self._chain(boundaries)
        if cost_s >= self._best_s:
            return False
        self._best, self._best_s = boundaries, cost_s
        return True

    def _within_reach(self, boundaries: tuple[int, ...]) -> bool:
        reach = self._reach
        return reach is None or all(abs(a - b) <= reach for a, b in zip(boundaries, self._start, strict=True))


def _moves(num_inner: int) -> Iterator[Move]:
    """All together, the rest against one end, neighbouring pairs along and against each other, each alone."""
    if num_inner >= 2:
        yield (1.0,) * num_inner
        yield tuple((at + 1) / num_inner for at in range(num_inner))
        yield tuple((num_inner - at) / num_inner for at in range(num_inner))
    if num_inner >= 3 and MODE & 4:
        yield tuple(1 - abs((at+1) * 2 / (num_inner + 1) - 1) for at in range(num_inner))
    for at in range(num_inner - 1):
        if num_inner >= 3:
            yield _place(num_inner, {at: 1.0, at + 1: 1.0})
        if MODE & 16:
            yield _place(num_inner, {at: 1.0, at + 1: -1.0})
    for at in range(num_inner):
        yield _place(num_inner, {at: 1.0})
    if MODE & 32 and num_inner <= 3:
        import itertools
        for x in itertools.product((1, 0, -1), repeat=num_inner):
            if sum(map(abs, x)) >= 2 and x > (0,)*num_inner and abs(sum(x)) < num_inner: yield x


def _place(num_inner: int, parts: dict[int, float]) -> Move:
    return tuple(parts.get(at, 0.0) for at in range(num_inner))


import os

MODE = int(os.environ.get("MODE", 0))
REP = int(os.environ.get("REP", 100))
