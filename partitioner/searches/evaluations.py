"""Evaluations of a search: calls of its cost function, each partition at most once, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan

from runahead.context import ContextPartition

Cost = Callable[[ContextPartition], float]
"""Cost function of a search: the seconds to the first token with a partition."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One evaluation of a search.

    Attributes:
        level: level of the search, from 0; strides halve from one level to the next.
        stride: tokens by which boundaries move at that level.
        is_best: its cost is lower than those of all evaluations before it.
    """

    level: int
    stride: int
    boundaries: tuple[int, ...]
    cost_s: float
    is_best: bool


@dataclass(kw_only=True)
class SearchResult:
    """The best partition that a search found, its cost, and all evaluations in order."""

    partition: ContextPartition
    cost_s: float
    trail: list[Step]

    @property
    def num_evaluations(self) -> int:
        """Number of calls of the cost function."""
        return len(self.trail)


class OutOfEvaluations(Exception):
    """Raised to end a search after its last evaluation. Not an error."""


class Evaluations:
    """Calls a cost function, at most once per partition and `max_evaluations` times in all.

    Args:
        on_evaluation: called after every evaluation.
    """

    def __init__(
        self, cost: Cost, *, max_evaluations: int | None = None, on_evaluation: Callable[[Step], None] | None = None
    ) -> None:
        if max_evaluations is not None and max_evaluations < 1:
            raise ValueError(f"search.max_evaluations={max_evaluations} must be at least 1")
        self._cost, self._max, self._on_evaluation = cost, max_evaluations, on_evaluation
        self._known: dict[tuple[int, ...], float] = {}
        self.trail: list[Step] = []
        self.best: tuple[int, ...] = ()
        self.best_s = inf
        self.level, self.stride = 0, 0

    def __call__(self, boundaries: tuple[int, ...]) -> float:
        """Cost of a partition in seconds.

        Raises:
            OutOfEvaluations: it is not known, and `max_evaluations` calls have been made.
        """
        if boundaries in self._known:
            return self._known[boundaries]
        if self._max is not None and len(self.trail) >= self._max:
            raise OutOfEvaluations
        cost_s = float(self._cost(ContextPartition(boundaries=boundaries)))
        assert not isnan(cost_s), boundaries
        is_best = cost_s < self.best_s or not self.trail
        if is_best:
            self.best, self.best_s = boundaries, cost_s
        step = Step(level=self.level, stride=self.stride, boundaries=boundaries, cost_s=cost_s, is_best=is_best)
        self._known[boundaries] = cost_s
        self.trail.append(step)
        if self._on_evaluation is not None:
            self._on_evaluation(step)
        return cost_s

    def result(self) -> SearchResult:
        return SearchResult(partition=ContextPartition(boundaries=self.best), cost_s=self.best_s, trail=self.trail)


def check_search(num_tokens: int, num_ranks: int, min_stride: int) -> None:
    """Raise a ValueError, which names the option, if there is nothing to search."""
    if num_tokens < 1:
        raise ValueError(f"a prompt of {num_tokens} tokens cannot be split; search.lengths must be at least 1")
    if num_ranks < 1:
        raise ValueError(f"search.ranks={num_ranks} must be at least 1")
    if min_stride < 1:
        raise ValueError(f"search.min_stride={min_stride} must be at least 1 token")


def on_grid(boundaries: list[int] | tuple[int, ...], min_stride: int) -> tuple[int, ...]:
    """Boundaries rounded to multiples of `min_stride`, except the last one."""
    num_tokens = boundaries[-1]
    most = num_tokens // min_stride * min_stride
    inner = [min(round(boundary / min_stride) * min_stride, most) for boundary in boundaries[1:-1]]
    return (0, *inner, num_tokens)


def coarse_stride(reach: float, min_stride: int) -> int:
    """The largest min_stride * 2^k that is at most `reach`; at least `min_stride`."""
    stride = min_stride
    while 2 * stride <= reach:
        stride *= 2
    return stride
