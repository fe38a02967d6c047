"""Which is sooner, a prompt on the last stage alone or on all: as predicted, corrected by the times of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MEMORY = 32
"""Most prompts that are remembered. A way that was not taken in so many is tried again."""
ABOUT = math.log(2.0)
"""Largest difference in log length of prompts whose times tell of each other."""
NEWEST = 5
"""Most prompts of a length and way that count."""


@dataclass(frozen=True, kw_only=True)
class SeenTime:
    """The time of a prompt that one stage or all have computed.

    Attributes:
        tokens: its length.
        log: log of the ratio of its seconds to those that were predicted.
    """

    tokens: int
    is_alone: bool
    log: float


class BothWays:
    """The times of prompts that were computed either way.

    At a length where only one way was seen, the other is taken to be as fast as predicted, which is the best that it
    can be, or faster if the one was. So it is tried once where the way that was seen turns out slower than that. One
    stage is predicted with all that lent threads may gain, and where neither way was seen a timing of them is believed.

    Args:
        seen: oldest first.
    """

    def __init__(self, seen: Sequence[SeenTime] = ()) -> None:
        self.seen = list(seen)

    def is_alone_sooner(self, num_tokens: int, alone_s: float, all_s: float, *, timed: float = 0.0) -> bool:
        """Whether one stage is sooner.

        Args:
            alone_s, all_s: predicted seconds of a prompt on one stage and on all.
            timed: log ratio of the seconds on one stage to the predicted ones, as timed once, maybe on a busy machine.
        """
        alone, both = self._log(num_tokens, is_alone=True), self._log(num_tokens, is_alone=False)
        if alone is None and both is None:
            alone = timed
        unseen = min(0.0, *(log for log in (alone, both) if log is not None), 0.0)
        alone, both = (unseen if log is None else log for log in (alone, both))
        return math.log(alone_s) + alone < math.log(all_s) + both

    def learn(self, num_tokens: int, *, is_alone: bool, predicted_s: float, measured_s: float) -> None:
        """Take in the seconds of one prompt."""
        if predicted_s > 0 and measured_s > 0:
            log = math.log(measured_s / predicted_s)
            self.seen = [*self.seen, SeenTime(tokens=num_tokens, is_alone=is_alone, log=log)][-MEMORY:]

    def _log(self, num_tokens: int, *, is_alone: bool) -> float | None:
        """Log ratio of the seconds of prompts of about this length to the predicted ones; None if none was seen."""
        near = [each for each in self.seen if abs(math.log(each.tokens / num_tokens)) <= ABOUT]
        logs = [each.log for each in near if each.is_alone == is_alone]
        return median(logs[-NEWEST:]) if logs else None
