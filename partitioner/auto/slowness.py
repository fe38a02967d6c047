"""Slowness of each rank against the cost: learned from prompts, forgotten when the machine changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

MEMORY = 64
"""Most prompts that are remembered."""
ALIKE_PROMPTS = 9
"""Most prompts of about the same length that count, the newest ones: enough for a mean that noise hardly moves."""
ALIKE = math.log(1.25)
"""Largest difference in log length of prompts that count as about as long as the nearest one: what the cost gets wrong
at one length, it gets wrong alike at these."""
CLOSE = 0.1
"""Largest difference from the median of what counts for the mean: what differs more was disturbed."""
CHANGE = 0.03
"""Least log change of a rank's slowness that counts as a change of the machine if two prompts in a row show it."""
TELLING = math.log(2.0)
"""Largest difference in log length from the nearest prompt known at which a prompt can surprise: the cost may be wrong
alike for all ranks no further than that."""
NOISE_FACTOR = 2.5
"""Least ratio of such a change to the median surprise so far."""


@dataclass(frozen=True, kw_only=True)
class SeenPrompt:
    """Slowness of the ranks in one prompt.

    Attributes:
        tokens: its length.
        slowness: log slowness by rank; None for a rank that had no tokens.
        surprise: by how much each differs from what was expected before; 0 for a rank without tokens.
    """

    tokens: int
    slowness: tuple[float | None, ...]
    surprise: tuple[float, ...]


class Slowness:
    """Log slowness of each rank: 0.4 takes exp(0.4) = 1.5 times as long as the cost says.

    The slowness at a length is the mean over prompts of about that length, without those far from the median, so that a
    disturbed prompt changes little.
    Differences between ranks are learned; a machine that is slower as a whole has another `pace`, which matters only
    for what a link costs beside the compute. If two
    prompts in a row find the same rank slower, or faster, than expected, all prompts before them are forgotten.

    Args:
        start: what is assumed before the first prompt.
        prompts: seen earlier, oldest first.

    Attributes:
        pace: log factor by which all ranks took longer in the last prompt than the cost and their slowness say.
    """

    def __init__(self, start: Sequence[float], prompts: Sequence[SeenPrompt] = ()) -> None:
        self.start, self.prompts, self.pace = tuple(start), list(prompts), 0.0

    def at(self, num_tokens: int) -> list[float]:
        """Log slowness of each rank for a prompt of this length."""
        prompts = self._about(num_tokens)
        found = []
        for rank, start in enumerate(self.start):
            told = [each for prompt in prompts if (each := prompt.slowness[rank]) is not None]
            found.append(_typical(told) if told else start)
        return found

    def learn(self, num_tokens: int, expected_s: Sequence[float], measured_s: Sequence[float]) -> None:
        """Take in one prompt.

        Args:
            expected_s: seconds of compute by rank that the cost says, without slowness; 0 for a rank without tokens.
            measured_s: what they were.
        """
        found = self._told(num_tokens, expected_s, measured_s)
        if found is None:
            return
        seen, self.pace = found
        self.prompts = [*self.prompts, seen][-MEMORY:]
        if self._has_changed():
            self.prompts = self.prompts[-2:]

    def surprise(self, num_tokens: int, expected_s: Sequence[float], measured_s: Sequence[float]) -> tuple[float, ...]:
        """By how much each rank's log slowness in a prompt differs from what is known; nothing that earlier ones do.

        Args:
            expected_s, measured_s: as of `learn`.

        Returns:
            zeros where they differ by no more than it usually varies from prompt to prompt, or nothing is known of
            prompts of half to twice that length.
        """
        found, none = self._told(num_tokens, expected_s, measured_s), (0.0,) * len(self.start)
        if found is None or len(self.prompts) < 2 or self._nearest(num_tokens) > TELLING:
            return none
        surprise = found[0].surprise
        return surprise if max(map(abs, surprise)) > self._usual(self.prompts) else none

    def _told(
        self, num_tokens: int, expected_s: Sequence[float], measured_s: Sequence[float]
    ) -> tuple[SeenPrompt, float] | None:
        """Slowness of the ranks in a prompt, and the pace in it; None of one rank, which is slower than no other."""
        known = self.at(num_tokens)
        ratios = [
            math.log(measured / expected) if measured > 0 and expected > 0 else None
            for expected, measured in zip(expected_s, measured_s, strict=True)
        ]
        present = [ratio - log for ratio, log in zip(ratios, known, strict=True) if ratio is not None]
        if len(present) < 2:
            return None
        common = fmean(present)
        told = tuple(None if ratio is None else ratio - common for ratio in ratios)
        surprise = tuple(0.0 if log is None else log - before for log, before in zip(told, known, strict=True))
        return SeenPrompt(tokens=num_tokens, slowness=told, surprise=surprise), common

    def _about(self, num_tokens: int) -> list[SeenPrompt]:
        """The newest prompts of about this length, else of about the nearest one."""

        most = self._nearest(num_tokens) + ALIKE
        return [seen for seen in self.prompts if _distance(seen, num_tokens) <= most][-ALIKE_PROMPTS:]

    def _nearest(self, num_tokens: int) -> float:
        """Difference in log length of the prompt that is nearest to it."""
        return min((_distance(seen, num_tokens) for seen in self.prompts), default=0.0)

    def _has_changed(self) -> bool:
        """Whether the last two prompts agree that a rank is slower, or faster, than those before them told."""
        if len(self.prompts) < 3:
            return False
        *before, first, second = self.prompts
        limit = self._usual(before)
        pairs = zip(first.surprise, second.surprise, strict=True)
        return any(min(a, b) > limit or max(a, b) < -limit for a, b in pairs)

    @staticmethod
    def _usual(prompts: Sequence[SeenPrompt]) -> float:
        """Largest surprise that is no change of the machine, by how much these prompts varied."""
        return max(CHANGE, NOISE_FACTOR * median(abs(each) for seen in prompts for each in seen.surprise))


def _distance(seen: SeenPrompt, num_tokens: int) -> float:
    return abs(math.log(seen.tokens / num_tokens))


def _typical(values: Sequence[float]) -> float:
    """Mean of the values that are close to their median; the median itself if none is, of two that differ much."""
    middle = median(values)
    return fmean([value for value in values if abs(value - middle) <= CLOSE] or [middle])
