"""What a search asks of its cost function, remembered: no partition is asked for twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan

from runahead.context import ContextPartition

Cost = Callable[[ContextPartition], float]
"""Partition -> seconds to the first token, wherever they come from."""


def remembered(cost: Cost) -> Cost:
    """The same cost, asked once per partition however many searches ask."""
    known: dict[tuple[int, ...], float] = {}

    def remember(partition: ContextPartition) -> float:
        if partition.boundaries not in known:
            known[partition.boundaries] = cost(partition)
        return known[partition.boundaries]

    return remember


@dataclass(frozen=True, kw_only=True)
class Step:
    """One evaluation.

    Attributes:
        level: of the search, from 0; strides halve from one to the next.
        stride: tokens by which boundaries moved at that level.
        is_best: cheaper than all evaluations before it.
    """

    level: int
    stride: int
    boundaries: tuple[int, ...]
    cost_s: float
    is_best: bool


@dataclass(kw_only=True)
class SearchResult:
    """The best partition that was found, and how.

    Attributes:
        num_evaluations: calls of the cost function.
        trail: the evaluations in order.
    """

    partition: ContextPartition
    cost_s: float
    num_evaluations: int
    trail: list[Step]


class OutOfEvaluations(Exception):
    """The search may not ask again. Carries no error."""


class Evaluations:
    """Calls the cost function, at most once per partition and `max_evaluations` times in all.

    Args:
        on_evaluation: told of every evaluation, for progress.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        max_evaluations: int | None = None,
        on_evaluation: Callable[[Step], None] | None = None,
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
        """Seconds.

        Raises:
            OutOfEvaluations: it is not known, and nothing more may be asked.
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
        return SearchResult(
            partition=ContextPartition(boundaries=self.best),
            cost_s=self.best_s,
            num_evaluations=len(self.trail),
            trail=self.trail,
        )


def check_search(num_tokens: int, num_ranks: int, min_stride: int) -> None:
    """Raises: ValueError if there is nothing to search, with the option's name."""
    if num_tokens < 1:
        raise ValueError(f"a prompt of {num_tokens} tokens cannot be split; search.lengths must be at least 1")
    if num_ranks < 1:
        raise ValueError(f"search.ranks={num_ranks} must be at least 1")
    if min_stride < 1:
        raise ValueError(f"search.min_stride={min_stride} must be at least 1 token")


def on_grid(boundaries: list[int] | tuple[int, ...], min_stride: int) -> tuple[int, ...]:
    """Boundaries rounded to multiples of min_stride, but the last."""
    num_tokens = boundaries[-1]
    most = num_tokens // min_stride * min_stride
    inner = [min(round(boundary / min_stride) * min_stride, most) for boundary in boundaries[1:-1]]
    return (0, *inner, num_tokens)


def coarse_stride(reach: float, min_stride: int) -> int:
    """The largest min_stride * 2^k that is at most `reach`, or min_stride."""
    stride = min_stride
    while 2 * stride <= reach:
        stride *= 2
    return stride
