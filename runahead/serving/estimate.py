"""Estimate of how long requests take, learned from those that were served."""

from __future__ import annotations

from collections.abc import Sequence

FORGETTING = 0.95
"""Weight that each batch leaves to those before it, so that the estimate follows the machine."""


class TimeEstimate:
    """Seconds of a prefill, as a * tokens + b * tokens^2 with a, b >= 0, and seconds of an answer's tokens.

    The constants minimise the squared relative error over the batches so far, the latest of which weigh most.
    """

    def __init__(self) -> None:
        self._moments = [0.0] * 5  # weighted sums of xx, xy, yy, x and y, see `learn`
        self._step_s: float | None = None
        self._new_tokens: float | None = None

    def learn(self, lengths: Sequence[int], ttft_s: float, tpot_s: float | None, new_tokens: Sequence[int]) -> None:
        """Take in a batch that was served.

        Args:
            lengths: of the prompts that were computed at once, in tokens.
            ttft_s: seconds of their prefill.
            tpot_s: seconds per step of decoding; None if there was only one token.
            new_tokens: length of each answer in tokens.
        """
        num_tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        # t = a n + b q is divided by t: 1 = a x + b y.
        x, y = num_tokens / max(ttft_s, 1e-6), squares / max(ttft_s, 1e-6)
        self._moments = [
            FORGETTING * old + new for old, new in zip(self._moments, (x * x, x * y, y * y, x, y), strict=True)
        ]
        if tpot_s is not None:
            self._step_s = tpot_s if self._step_s is None else 0.8 * self._step_s + 0.2 * tpot_s
        mean = sum(new_tokens) / max(1, len(new_tokens))
        self._new_tokens = mean if self._new_tokens is None else 0.9 * self._new_tokens + 0.1 * mean

    @property
    def constants(self) -> tuple[float, float]:
        """Seconds per token and per squared token of a prompt; 0, 0 before the first batch."""
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

    def prefill_s(self, lengths: Sequence[int]) -> float:
        """Seconds until the first tokens of prompts that run at once."""
        per_token, per_square = self.constants
        return per_token * sum(lengths) + per_square * sum(length**2 for length in lengths)

    def decoding_s(self, max_new_tokens: int) -> float:
        """Seconds of the tokens after the first, of an answer as long as answers have been."""
        num_tokens = min(max_new_tokens, self._new_tokens or 1.0)
        return (self._step_s or 0.0) * max(0.0, num_tokens - 1)
