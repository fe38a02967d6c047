"""Evaluations of a search: calls of its cost function, each partition at most once, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan

from runahead.context import ContextPartition

Cost = Callable[[ContextPartition], float]
"""Cost function of a search: the seconds to the first token with a partition."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
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
    trail: list[Evaluation]

    @property
    def num_evaluations(self) -> int:
        """Number of calls of the cost function."""
        return len(self.trail)

    @classmethod
    def joined(cls, searches: Sequence[SearchResult]) -> SearchResult:
        """Join searches to one: the best result, and all evaluations in order."""
        best, trail = inf, list[Evaluation]()
        for step in (step for search in searches for step in search.trail):
            trail.append(replace(step, is_best=step.cost_s < best))
            best = min(best, step.cost_s)
        return replace(min(searches, key=lambda search: search.cost_s), trail=trail)

    def ending(self, partition: ContextPartition, cost_s: float) -> SearchResult:
        """The search with one more step, whose partition is the result, better or not."""
        last, is_best = self.trail[-1], cost_s < self.cost_s
        step = replace(last, boundaries=partition.boundaries, cost_s=cost_s, is_best=is_best)
        return SearchResult(partition=partition, cost_s=cost_s, trail=[*self.trail, step])


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """A prompt whose best split is searched, and the limits of the search.

    Attributes:
        min_stride: inner boundaries are multiples of it, in tokens, unless a seed itself is the best.
        reach: most tokens by which a boundary may end up away from the seed; None for any. The grid has no reach.
        leave_out: also try to leave ranks out.
        ranks_alike: all ranks and all links are alike, so that the last ranks are left out.
        max_evaluations: stop after this number, with the best so far; None for any.
        on_evaluation: called after every evaluation.

    Raises:
        ValueError: there is nothing to search; the message names the option.
    """

    num_tokens: int
    num_ranks: int
    min_stride: int
    reach: int | None = None
    leave_out: bool = True
    ranks_alike: bool = False
    max_evaluations: int | None = None
    on_evaluation: Callable[[Evaluation], None] = lambda step: None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"a prompt of {self.num_tokens} tokens cannot be split; search.lengths must be at least 1")
        if self.num_ranks < 1:
            raise ValueError(f"search.ranks={self.num_ranks} must be at least 1")
        if self.min_stride < 1:
            raise ValueError(f"search.min_stride={self.min_stride} must be at least 1 token")
        if self.reach is not None and self.reach < self.min_stride:
            raise ValueError(f"search.reach={self.reach} must be at least search.min_stride={self.min_stride}")
        if self.max_evaluations is not None and self.max_evaluations < 1:
            raise ValueError(f"search.max_evaluations={self.max_evaluations} must be at least 1")

    def on_grid(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Boundaries rounded to multiples of `min_stride`, except the last one."""
        most = self.num_tokens // self.min_stride * self.min_stride
        inner = [min(round(boundary / self.min_stride) * self.min_stride, most) for boundary in boundaries[1:-1]]
        return (0, *inner, self.num_tokens)

    def coarse_stride(self, most: float) -> int:
        """The largest min_stride * 2^k that is at most `most`; at least `min_stride`."""
        stride = self.min_stride
        while 2 * stride <= most:
            stride *= 2
        return stride


class OutOfEvaluations(Exception):
    """Raised to end a search after its last evaluation. Not an error."""


class Evaluations:
    """Calls a cost function for a task, at most once per partition and `max_evaluations` times in all."""

    def __init__(self, cost: Cost, task: SearchTask) -> None:
        self.task, self._cost = task, cost
        self._known: dict[tuple[int, ...], float] = {}
        self.trail: list[Evaluation] = []
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
        if self.task.max_evaluations is not None and len(self.trail) >= self.task.max_evaluations:
            raise OutOfEvaluations
        cost_s = float(self._cost(ContextPartition(boundaries=boundaries)))
        assert not isnan(cost_s), boundaries
        is_best = cost_s < self.best_s or not self.trail
        if is_best:
            self.best, self.best_s = boundaries, cost_s
        step = Evaluation(level=self.level, stride=self.stride, boundaries=boundaries, cost_s=cost_s, is_best=is_best)
        self._known[boundaries] = cost_s
        self.trail.append(step)
        self.task.on_evaluation(step)
        return cost_s

    def result(self) -> SearchResult:
        return SearchResult(partition=ContextPartition(boundaries=self.best), cost_s=self.best_s, trail=self.trail)
