"""The mean of paired differences, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

RESAMPLES = 10_000
LEAST_PAIRS = 5
"""Number of pairs below which no interval is given."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of paired differences, and its 95% interval; None with too few pairs."""

    mean: float
    interval: tuple[float, float] | None

    @classmethod
    def with_interval(cls, differences: Sequence[float]) -> Difference:
        """Mean, with an interval by the percentile bootstrap; the same draws with replacement every time."""
        if len(differences) < LEAST_PAIRS:
            return cls(mean=mean(differences), interval=None)
        values_n = np.asarray(differences)
        drawn_Rn = np.random.default_rng(0).integers(len(values_n), size=(RESAMPLES, len(values_n)))
        low, high = np.quantile(values_n[drawn_Rn].mean(axis=1), [0.025, 0.975])
        return cls(mean=float(values_n.mean()), interval=(float(low), float(high)))

    def told(self, number: Callable[[float], str]) -> str:
        """The mean with its interval, if it has one; `number` writes each of the three."""
        if self.interval is None:
            return number(self.mean)
        low, high = self.interval
        return f"{number(self.mean)} ({number(low)} to {number(high)})"


def in_points(share: float) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * share:+.0f}"
