"""Progress bar of a search: the best TTFT so far, the estimated evaluations left, and the time that they take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median

from tqdm import tqdm

from partitioner.options import SearchOptions
from partitioner.searches import STRATEGIES
from partitioner.searches.evaluations import Cost, Evaluation, SearchTask
from runahead.context import ContextPartition

REMEMBERED = 15
"""Number of latest evaluations whose median time is used."""
REFRESH_S = 0.5
"""Least seconds between two updates of the bar."""


class SearchProgress:
    """Progress bar of searches, one per prompt length and number of ranks.

    The time left is estimated from the evaluations left, in this and later searches, at the median time of the latest
    ones, which is taken to be proportional to the tokens per rank.

    Args:
        searches: (length, ranks) of the searches, in order; more may follow.
        shown: this rank shows the bar.
    """

    def __init__(self, searches: Sequence[tuple[int, int]], options: SearchOptions, *, shown: bool) -> None:
        self._later, self._options = list(searches), options
        self._bar = tqdm(
            total=len(searches),
            desc="searching",
            disable=not shown,
            leave=False,
            bar_format="{desc}: {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )
        self._unit_s: deque[float] = deque(maxlen=REMEMBERED)  # of an evaluation, per token of a rank
        self._length, self._count = 1, 1
        self._best_s, self._evaluations = inf, 0
        self._stride: int | None = None
        self._at_stride = 0
        self._shown_s = 0.0

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, length: int, count: int) -> None:
        """Begin a search, one of those announced or an additional one, and end the one before."""
        if self._evaluations:
            self._bar.total = max(self._bar.total, self._bar.n + 1)
            self._bar.update()
        if (length, count) in self._later:
            self._later.remove((length, count))
        self._length, self._count = length, count
        self._best_s, self._evaluations, self._stride, self._at_stride = inf, 0, None, 0

    def timed(self, cost: Cost) -> Cost:
        """The same cost function with its calls timed. Calls that a cache answers must not go through it."""

        def with_time(partition: ContextPartition) -> float:
            begin = time.perf_counter()
            cost_s = cost(partition)
            self._unit_s.append((time.perf_counter() - begin) * self._count / self._length)
            return cost_s

        return with_time

    def tick(self, step: Evaluation) -> None:
        """Count an evaluation of this search."""
        self._best_s, self._evaluations = min(self._best_s, step.cost_s), self._evaluations + 1
        self._at_stride = self._at_stride + 1 if step.stride == self._stride else 1
        self._stride = step.stride
        if time.monotonic() - self._shown_s > REFRESH_S:
            self._shown_s = time.monotonic()
            self._bar.set_postfix_str(self.text())

    def evaluations_left(self) -> int:
        """Estimated number of evaluations left in this search."""
        return self._left(self._length, self._count, self._stride, self._at_stride)

    def seconds_left(self) -> float | None:
        """Estimated seconds left for this and all later searches; None before the first measurement."""
        if not self._unit_s:
            return None
        tokens = self.evaluations_left() * self._length / self._count
        tokens += sum(self._left(length, count) * length / count for length, count in self._later)
        return median(self._unit_s) * tokens

    def _left(self, length: int, count: int, stride: int | None = None, at_stride: int = 0) -> int:
        task = SearchTask(
            num_tokens=length,
            num_ranks=count,
            min_stride=self._options.stride(length, count),
            reach=self._options.reach_tokens(length, count),
        )
        return STRATEGIES[self._options.method].evaluations_left(task, stride, at_stride)

    def text(self) -> str:
        """Text of the bar."""
        seconds = self.seconds_left()
        return (
            f"{self._length} tokens, {self._count} ranks: best {self._best_s:.4g} s after {self._evaluations} "
            f"evaluations, about {self.evaluations_left()} left"
            + ("" if seconds is None else f"; all in about {_duration(seconds)}")
        )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
