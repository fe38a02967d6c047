"""Pattern search from a seed: moves boundaries alone and together, by strides that shrink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf

from partitioner.searches.chains import Chain, search_chains
from partitioner.searches.evaluations import Cost, Evaluations, SearchResult, Step, check_search, coarse_stride, on_grid
from runahead.context import ContextPartition, even

Move = tuple[float, ...]
"""Displacement of each inner boundary, in strides."""


def seeded_search(
    cost: Cost,
    num_tokens: int,
    num_ranks: int,
    *,
    min_stride: int,
    seed: ContextPartition | None = None,
    reach: int | None = None,
    leave_out: bool = True,
    ranks_alike: bool = False,
    max_evaluations: int | None = None,
    on_evaluation: Callable[[Step], None] | None = None,
) -> SearchResult:
    """Search the partition with the lowest cost near a seed, by pattern search.

    At every stride each move is tried in both directions until no move helps; then the stride is halved. Moves of one
    boundary alone get stuck, since TTFT is about a maximum over ranks: relieving one rank burdens another. So
    boundaries also move in neighbouring pairs and all together. No move empties a chunk; `search_chains` leaves ranks
    out afterwards.

    Args:
        seed: equal work, or an interpolation of known entries; by default even chunks.
        min_stride: inner boundaries are multiples of it, in tokens, unless the seed itself is the best.
        reach: most tokens by which a boundary may end up away from the start; by default any. The first stride is half
            of it, by default a quarter of an even chunk.
        leave_out: also try to leave ranks out.
        ranks_alike: all ranks and all links are alike, so that the last ranks are left out.
        max_evaluations: stop after so many, with the best so far.
        on_evaluation: called after each evaluation.

    Raises:
        ValueError: numbers below 1, or a seed for another length or number of ranks.
    """
    check_search(num_tokens, num_ranks, min_stride)
    if reach is not None and reach < min_stride:
        raise ValueError(f"search.reach={reach} must be at least search.min_stride={min_stride}")
    seed = (seed or even(num_tokens, num_ranks)).check(num_tokens, num_ranks)
    evaluations = Evaluations(cost, max_evaluations=max_evaluations, on_evaluation=on_evaluation)
    start = on_grid(seed.boundaries, min_stride)
    first_stride = _first_stride(num_tokens, num_ranks, min_stride, reach)

    def descend(chain: Chain, boundaries: tuple[int, ...]) -> None:
        _PatternSearch(chain, boundaries, min_stride, reach).run(first_stride)

    evaluations.stride = first_stride
    evaluations(seed.boundaries)
    return search_chains(evaluations, start, min_stride, descend, leave_out=leave_out, ranks_alike=ranks_alike)


def evaluations_left(
    num_tokens: int,
    num_ranks: int,
    *,
    min_stride: int,
    reach: int | None = None,
    stride: int | None = None,
    at_stride: int = 0,
) -> int:
    """Estimate how many evaluations a search still needs: two sweeps at each stride, one that helps and one in vain.

    Args:
        stride: the search's present stride; None before its start.
        at_stride: evaluations at that stride so far.
    """
    if num_ranks == 1:
        return 0 if stride else 1
    num_inner = num_ranks - 1
    sweep = 2 * (len(list(_smooth_moves(num_inner))) + len(list(_local_moves(num_inner))))
    stride = stride or _first_stride(num_tokens, num_ranks, min_stride, reach)
    strides_after = (stride // min_stride).bit_length() - 1
    return max(0, 2 * sweep - at_stride) + 2 * sweep * strides_after


def _first_stride(num_tokens: int, num_ranks: int, min_stride: int, reach: int | None) -> int:
    return coarse_stride(num_tokens / (4 * num_ranks) if reach is None else reach / 2, min_stride)


class _PatternSearch:
    """Pattern search over the boundaries of one chain, from a start."""

    def __init__(self, chain: Chain, start: tuple[int, ...], min_stride: int, reach: int | None) -> None:
        self._chain, self._start, self._min_stride, self._reach = chain, start, min_stride, reach
        num_inner = len(start) - 2
        self._smooth, self._local = list(_smooth_moves(num_inner)), list(_local_moves(num_inner))
        self._best, self._best_s = start, inf

    def run(self, stride: int) -> None:
        evaluations = self._chain.evaluations
        evaluations.stride = stride
        self._best_s = self._chain(self._start)
        while self._shrink():
            pass
        while True:
            while self._sweep(evaluations.stride, self._smooth + self._local):
                pass
            if evaluations.stride > self._min_stride:
                evaluations.level, evaluations.stride = evaluations.level + 1, evaluations.stride // 2
            # At the finest stride fractions of a smooth move are rounded away, so these get twice the stride.
            elif not self._sweep(2 * self._min_stride, self._smooth):
                return

    def _shrink(self) -> bool:
        """Halve all chunks but the last, which gets the rest: on slow links the best split is so far from the seed."""
        *inner, num_tokens = self._best[1:]
        return self._go(on_grid([0, *(boundary // 2 for boundary in inner), num_tokens], self._min_stride))

    def _sweep(self, stride: int, moves: list[Move]) -> bool:
        """Try all moves, and return whether any helped."""
        before = self._best_s
        for move in moves:
            _ = self._try(move, stride) or self._try(move, -stride)
        return self._best_s < before

    def _try(self, move: Move, stride: int) -> bool:
        unit = self._min_stride
        inner = [b + round(part * stride / unit) * unit for b, part in zip(self._best[1:-1], move, strict=True)]
        return self._go((0, *inner, self._best[-1]))

    def _go(self, boundaries: tuple[int, ...]) -> bool:
        """Move to these boundaries if that lowers the cost, and return whether it does."""
        if not self._allows(boundaries):
            return False
        cost_s = self._chain(boundaries)
        if cost_s >= self._best_s:
            return False
        self._best, self._best_s = boundaries, cost_s
        return True

    def _allows(self, boundaries: tuple[int, ...]) -> bool:
        """Whether boundaries are within reach and empty no chunk, which only other chains may do."""
        if self._reach is not None and any(
            abs(a - b) > self._reach for a, b in zip(boundaries, self._start, strict=True)
        ):
            return False
        now = pairwise(self._best)
        return all(a < b or (a == b and c == d) for (a, b), (c, d) in zip(pairwise(boundaries), now, strict=True))


def _smooth_moves(num_inner: int) -> Iterator[Move]:
    """Moves that relieve earlier ranks and burden later ones: all boundaries alike, ramps up and down, and a hump."""
    if num_inner < 2:
        return
    yield (1.0,) * num_inner
    for start in range(2 if num_inner > 2 else 1):
        ramp = [max(0.0, (at + 1 - start) / (num_inner - start)) for at in range(num_inner)]
        yield tuple(ramp)
        yield tuple(reversed(ramp))
    if num_inner > 2:
        middle = (num_inner - 1) / 2
        yield tuple(1 - abs(at - middle) / (middle + 1) for at in range(num_inner))


def _local_moves(num_inner: int) -> Iterator[Move]:
    """Moves of neighbouring pairs of boundaries, in the same and in opposite directions, and of each one alone."""
    for at in range(num_inner - 1):
        if num_inner > 2:
            yield tuple(float(at <= each <= at + 1) for each in range(num_inner))
        yield tuple(float(at == each) - float(at + 1 == each) for each in range(num_inner))
    for at in range(num_inner):
        yield tuple(float(at == each) for each in range(num_inner))
