"""Estimate of how long requests take, learned from those that were served."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.95
"""Weight that each prefill leaves to those before it."""

FOLLOWING, MOST_STEP = 0.4, math.log(4)
"""Share of the way that the slowness goes with a prefill, of at most so many (in logarithms)."""

HALF_LIFE_S = 300.0
"""Seconds without a prefill in which half of the slowness (of its logarithm) is forgotten."""

MOST_RATIO = 1.1
"""Most times by which a prefill differs from what was learned and the slowness; what is beyond tells of the machine."""

TERMS = ((1,), (1, 2), (0, 1), (0, 2), (2,), (0,), (0, 1, 2))
"""Which of the constants c, a and b are not 0, in the order in which they are taken where they fit equally well."""

ASSUMED_BYTES_PER_S = 1e9
"""Rate at which stored prefixes reach the first stage, until it is measured: less than a link of 10 Gbit/s carries."""

WAITING = 0.1
"""Least share of its time that a stage stands still if what it waits for takes as long as its part of a prefill."""


class Slowness:
    """How many times longer all prefills take now than was learned of their lengths: other work comes and goes.

    Any prefill tells it, and it counts for all lengths. So prompts that are refused because long ones took too long on
    a busy machine are taken again after short ones have been computed sooner, or a while later.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._log, self._heard_s = clock, 0.0, clock()

    @property
    def factor(self) -> float:
        return math.exp(self._now)

    @property
    def _now(self) -> float:
        return self._log * 0.5 ** ((self.clock() - self._heard_s) / HALF_LIFE_S)

    def learn(self, ratio: float) -> None:
        """Take in how many times longer a prefill took than was learned. A single one that hung counts for little."""
        step = math.log(ratio) - self._now
        self._log, self._heard_s = self._now + FOLLOWING * max(-MOST_STEP, min(step, MOST_STEP)), self.clock()


@dataclass
class LearnedTimes:
    """Seconds of a prefill, as c + a * tokens + b * tokens^2 with a, b, c >= 0.

    The constants minimise the squared error relative to what was predicted, over the prefills so far, the latest of
    which weigh most. So a slow prefill counts as much as a fast one, a short one as much as a long one.

    Attributes:
        constants: c, a and b.
        longest: length of the longest prompt so far in tokens.
        fewest, most: tokens that were computed at once so far.
    """

    constants: tuple[float, float, float] = (0.0, 0.0, 0.0)
    longest: int = 0
    fewest: float = math.inf
    most: int = 0
    _moments: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    """Weighted sums of the products of 1, tokens, squares and seconds."""

    def learned(self, longest: int, num_tokens: int, squares: int, seconds: float) -> LearnedTimes:
        """A copy that has taken in a prefill, too."""
        predicted_s = self.seconds(num_tokens, squares) or seconds
        if not self.fewest <= num_tokens <= self.most:  # a guess, so one that was too low gives it no more weight
            predicted_s = max(predicted_s, seconds)
        row = np.array([1.0, num_tokens, squares, seconds]) / predicted_s
        moments = FORGETTING * self._moments + np.outer(row, row)
        fewest, most = min(self.fewest, num_tokens), max(self.most, num_tokens)
        return LearnedTimes(_fitted(moments), max(self.longest, longest), fewest, most, moments)

    def seconds(self, num_tokens: int, squares: int) -> float:
        per_prefill, per_token, per_square = self.constants
        return per_prefill + per_token * num_tokens + per_square * squares


class PrefillTimes:
    """Seconds of a prefill, as those that were served tell, times the slowness of the machine.

    The first prompt that is longer than all before, and takes longer than was guessed, may tell of its length or of the
    machine. Of prompts longer than those before it is believed until another one of these was sooner, or for
    `HALF_LIFE_S`, so that it does not keep them out for ever; and of all once another one was not sooner.

    Args:
        slowness: of the machine; by default of this object alone.
    """

    def __init__(self, slowness: Slowness | None = None) -> None:
        self._slowness = slowness or Slowness()
        self._sure, self._unsure, self._unsure_s = LearnedTimes(), LearnedTimes(), -math.inf

    def _times(self, num_tokens: float = math.inf) -> LearnedTimes:
        """The times that predict so many tokens, by default more than all before."""
        return self._unsure if self._is_unsure and num_tokens > self._sure.most else self._sure

    @property
    def _is_unsure(self) -> bool:
        return self._slowness.clock() - self._unsure_s < HALF_LIFE_S

    def learn(self, lengths: Sequence[int], seconds: float, reused: Sequence[int] = ()) -> None:
        """Take in the prefill of prompts of these lengths in tokens, which were computed at once.

        Args:
            reused: first tokens of each prompt that were not computed; by default none.
        """
        prefill = max(lengths), *_computed(lengths, reused), max(seconds / self._slowness.factor, 1e-6)
        self._sure = self._sure.learned(*prefill)
        if self._is_unsure:
            self._unsure = self._unsure.learned(*prefill)

    def learn_served(self, lengths: Sequence[int], seconds: float, reused: Sequence[int] = ()) -> None:
        """Take in a prefill, as `learn` does, which also tells how slow the machine is now.

        It does so if it is neither shorter nor longer than all before, as the times of others were guesses.
        """
        num_tokens, squares = _computed(lengths, reused)
        if self._is_unsure and num_tokens > self._sure.most:
            is_sooner = MOST_RATIO * seconds < self.seconds(lengths, reused)
            self._sure, self._unsure_s = self._sure if is_sooner else self._unsure, -math.inf
        times = self._times(num_tokens)
        learned_s = times.seconds(num_tokens, squares)
        if times.fewest <= num_tokens <= times.most and learned_s:
            self._slowness.learn(max(seconds, 1e-6) / learned_s)
            most_s = MOST_RATIO * learned_s * self._slowness.factor
            seconds = max(most_s / MOST_RATIO**2, min(seconds, most_s))
        elif num_tokens > times.most and 0 < MOST_RATIO * self.seconds(lengths, reused) < seconds:
            prefill = max(lengths), num_tokens, squares, seconds / self._slowness.factor
            self._unsure, self._unsure_s = self._sure.learned(*prefill), self._slowness.clock()
            return
        self.learn(lengths, seconds, reused)

    @property
    def longest(self) -> int:
        """Length of the longest prompt so far in tokens; of longer ones `seconds` is a guess."""
        return self._times().longest

    @property
    def constants(self) -> tuple[float, float]:
        """Seconds per token and per squared token of a prompt; 0, 0 before the first prefill."""
        factor, (_, per_token, per_square) = self._slowness.factor, self._times().constants
        return factor * per_token, factor * per_square

    def seconds(self, lengths: Sequence[int], reused: Sequence[int] = ()) -> float:
        """Seconds until the first tokens of prompts that are computed at once, without what they reuse."""
        num_tokens, squares = _computed(lengths, reused)
        return self._slowness.factor * self._times(num_tokens).seconds(num_tokens, squares)


def _fitted(moments: NDArray[np.float64]) -> tuple[float, float, float]:
    """The constants c, a, b >= 0 of the least squares, by trying which of them are not 0."""
    best, least = [0.0] * 3, math.inf
    tolerance = 1e-9 * moments[3, 3]
    for terms in map(list, TERMS):
        products, wanted = moments[np.ix_(terms, terms)], moments[terms, 3]
        scale = np.sqrt(np.diag(products))
        scaled = products / np.outer(scale, scale)
        if np.linalg.det(scaled) < 1e-9:  # these lengths do not tell them apart
            continue
        found = np.linalg.solve(scaled, wanted / scale) / scale
        error = moments[3, 3] - 2 * found @ wanted + found @ products @ found
        if found.min() >= 0 and error < least - tolerance:
            least, values = float(error), dict(zip(terms, map(float, found), strict=True))
            best = [values.get(term, 0.0) for term in range(3)]
    return best[0], best[1], best[2]


def _computed(lengths: Sequence[int], reused: Sequence[int]) -> tuple[int, int]:
    """Tokens of prompts and segments that are computed, and what they add to the squares of the lengths.

    Args:
        reused: of the first lengths; the others, of segments, are computed whole.
    """
    num_reused = [*reused, *[0] * (len(lengths) - len(reused))]
    return sum(lengths) - sum(num_reused), sum(n * n - r * r for n, r in zip(lengths, num_reused, strict=True))


class TimeEstimate:
    """Times of a server.

    Attributes:
        alone: prefills that one stage computes.
        chain: prefills that all stages compute.
        step_s: seconds of a decoding step with as many rows as there were lately; 0 before the first.
        s_per_byte: seconds per byte of stored prefixes that the last stage sends to all.
    """

    def __init__(self) -> None:
        slowness = Slowness()
        self.alone, self.chain = PrefillTimes(slowness), PrefillTimes(slowness)
        self.step_s, self.s_per_byte = 0.0, 1 / ASSUMED_BYTES_PER_S
        self._new_tokens: float | None = None

    def learn_step(self, seconds: float) -> None:
        """Take in a decoding step."""
        self.step_s = 0.8 * self.step_s + 0.2 * seconds if self.step_s else seconds

    def learn_transfer(self, num_bytes: int, seconds: float, wait_s: float) -> None:
        """Take in a prefill after stored prefixes.

        Args:
            num_bytes: of them, that the first stage has received.
            seconds: of its part of the prefill, during which they arrived.
            wait_s: of these, in which it stood still.
        """
        measured = seconds / num_bytes
        if wait_s > WAITING * seconds:
            self.s_per_byte = 0.7 * self.s_per_byte + 0.3 * measured
        else:  # they were there in time, so they take less
            self.s_per_byte = min(self.s_per_byte, measured)

    def after_prefixes_s(self, lengths: Sequence[int], reused: Sequence[int], num_bytes: int) -> float:
        """Seconds of prompts that all stages compute after stored prefixes of so many bytes, which arrive meanwhile."""
        return max(self.chain.seconds(lengths, reused), num_bytes * self.s_per_byte)

    def learn_answer(self, num_tokens: int) -> None:
        """Take in the length of an answer in tokens."""
        self._new_tokens = num_tokens if self._new_tokens is None else 0.9 * self._new_tokens + 0.1 * num_tokens

    @property
    def constants(self) -> tuple[float, float]:
        """Seconds per token and per squared token of a long prompt."""
        return self.chain.constants if any(self.chain.constants) else self.alone.constants

    def decoding_s(self, max_new_tokens: int) -> float:
        """Seconds of the tokens after the first, of an answer as long as answers have been."""
        return self.step_s * max(0.0, min(max_new_tokens, self._new_tokens or 1.0) - 1)
