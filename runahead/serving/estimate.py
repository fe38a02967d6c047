"""Estimate of how long requests take, learned from those that were served."""

from __future__ import annotations

from collections.abc import Sequence

FORGETTING = 0.95
"""Weight that each prefill leaves to those before it, so that the estimate follows the machine."""


ASSUMED_BYTES_PER_S = 1e9
"""Rate at which stored prefixes reach the first stage, until it is measured: less than a link of 10 Gbit/s carries."""

WAITING = 0.1
"""Least share of its time that a stage stands still if what it waits for takes as long as its part of a prefill."""


class PrefillTimes:
    """Seconds of a prefill, as a * tokens + b * tokens^2 with a, b >= 0.

    The constants minimise the squared relative error over the prefills so far, the latest of which weigh most.

    Attributes:
        longest: length of the longest prompt so far in tokens; of longer ones `seconds` is a guess.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._moments = [0.0] * 5  # weighted sums of xx, xy, yy, x and y, see `learn`

    def learn(self, lengths: Sequence[int], seconds: float, reused: Sequence[int] = ()) -> None:
        """Take in the prefill of prompts of these lengths in tokens, which were computed at once.

        Args:
            reused: first tokens of each prompt that were not computed; by default none.
        """
        self.longest = max(self.longest, *lengths)
        num_tokens, squares = _computed(lengths, reused)
        # t = a n + b q is divided by t: 1 = a x + b y.
        x, y = num_tokens / max(seconds, 1e-6), squares / max(seconds, 1e-6)
        self._moments = [
            FORGETTING * old + new for old, new in zip(self._moments, (x * x, x * y, y * y, x, y), strict=True)
        ]

    @property
    def constants(self) -> tuple[float, float]:
        """Seconds per token and per squared token of a prompt; 0, 0 before the first prefill."""
        xx, xy, yy, x, y = self._moments
        if not xx:
            return 0.0, 0.0
        determinant = xx * yy - xy * xy
        if determinant > 1e-9 * xx * yy:
            a, b = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, y / yy
        return x / xx, 0.0

    def seconds(self, lengths: Sequence[int], reused: Sequence[int] = ()) -> float:
        """Seconds until the first tokens of prompts that are computed at once, without what they reuse."""
        per_token, per_square = self.constants
        num_tokens, squares = _computed(lengths, reused)
        return per_token * num_tokens + per_square * squares


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
        self.alone, self.chain = PrefillTimes(), PrefillTimes()
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
