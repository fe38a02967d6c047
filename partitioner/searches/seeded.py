"""Pattern search from a seed: moves boundaries alone and together, by strides that shrink."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from partitioner.searches.chains import Chain
from partitioner.searches.evaluations import Evaluations, SearchTask
from partitioner.searches.strategy import Strategy
from runahead.context import ContextPartition, even

Move = tuple[float, ...]
"""Displacement of each inner boundary, in strides."""


class Seeded(Strategy):
    """Pattern search near a seed.

    At every stride each move is tried in both directions until no move helps; then the stride is halved. Moves of one
    boundary alone get stuck, since TTFT is about a maximum over ranks: relieving one rank burdens another. So
    boundaries also move in neighbouring pairs and all together. No move empties a chunk; `search_chains` leaves ranks
    out afterwards.
    """

    takes_seed = True
    most_ranks = None

    def evaluations_left(self, task: SearchTask, stride: int | None = None, at_stride: int = 0) -> int:
        """Two sweeps at each stride, one that helps and one in vain."""
        if task.num_ranks == 1:
            return 0 if stride else 1
        num_inner = task.num_ranks - 1
        sweep = 2 * (len(list(_smooth_moves(num_inner))) + len(list(_local_moves(num_inner))))
        strides_after = ((stride or _first_stride(task)) // task.min_stride).bit_length() - 1
        return max(0, 2 * sweep - at_stride) + 2 * sweep * strides_after

    def _start(self, evaluations: Evaluations, seed: ContextPartition | None) -> tuple[int, ...]:
        task = evaluations.task
        seed = (seed or even(task.num_tokens, task.num_ranks)).check(task.num_tokens, task.num_ranks)
        evaluations.stride = _first_stride(task)
        evaluations(seed.boundaries)
        return task.on_grid(seed.boundaries)

    def _descend(self, chain: Chain, start: tuple[int, ...]) -> None:
        _PatternSearch(chain, start).run()


def _first_stride(task: SearchTask) -> int:
    """Half the reach, by default a quarter of an even chunk."""
    return task.coarse_stride(task.num_tokens / (4 * task.num_ranks) if task.reach is None else task.reach / 2)


class _PatternSearch:
    """Pattern search over the boundaries of one chain, from a start."""

    def __init__(self, chain: Chain, start: tuple[int, ...]) -> None:
        self._chain, self._task, self._start = chain, chain.evaluations.task, start
        num_inner = len(start) - 2
        self._smooth, self._local = list(_smooth_moves(num_inner)), list(_local_moves(num_inner))
        self._best, self._best_s = start, inf

    def run(self) -> None:
        evaluations, min_stride = self._chain.evaluations, self._task.min_stride
        evaluations.stride = _first_stride(self._task)
        self._best_s = self._chain(self._start)
        while self._shrink():
            pass
        while True:
            while self._sweep(evaluations.stride, self._smooth + self._local):
                pass
            if evaluations.stride > min_stride:
                evaluations.level, evaluations.stride = evaluations.level + 1, evaluations.stride // 2
            # At the finest stride fractions of a smooth move are rounded away, so these get twice the stride.
            elif not self._sweep(2 * min_stride, self._smooth):
                return

    def _shrink(self) -> bool:
        """Halve all chunks but the last, which gets the rest: on slow links the best split is so far from the seed."""
        *inner, num_tokens = self._best[1:]
        return self._go(self._task.on_grid([0, *(boundary // 2 for boundary in inner), num_tokens]))

    def _sweep(self, stride: int, moves: list[Move]) -> bool:
        """Try all moves, and return whether any helped."""
        before = self._best_s
        for move in moves:
            _ = self._try(move, stride) or self._try(move, -stride)
        return self._best_s < before

    def _try(self, move: Move, stride: int) -> bool:
        unit = self._task.min_stride
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
        reach = self._task.reach
        if reach is not None and any(abs(a - b) > reach for a, b in zip(boundaries, self._start, strict=True)):
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
