"""Predicts the gain of speculation from the times of its steps, and chooses how many tokens to verify, or none."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from runahead.decoding.row import RowId

LOSS = 0.02
"""Share of the decoding time that verifications may have lost altogether, so that speculation stays near plain time."""

FREE_STEPS = 2
"""Plain steps whose time may be lost besides, for the first trials."""

SAVED_STEPS = 20
"""Plain steps up to whose time it adds up, so that hours in which speculation paid allow no long loss after them."""

INVESTED = 0.01
"""Share of the time of the tokens that may still come that a drafter may take to begin, besides."""

LEAST_HOPE = 0.5
"""Predicted gain below which no trial is worth its loss."""

DRAFT_COST = 0.25
"""Share of a plain step that a drafted token is taken to cost before one was drafted, so that trials begin small."""

NUM_TIMES = 5
"""Last times of a kind of step of which the median counts."""

MEMORY = 0.9
"""Weight that the tokens so far keep with each new one, so that an acceptance rate follows the text."""


class AcceptanceRate:
    """Moving average of the share of a row's drafted tokens that are right, given that those before them are."""

    def __init__(self) -> None:
        self._accepted, self._tried = 1.0, 2.0  # so that the first drafts are tried

    def add(self, accepted: int, *, was_rejected: bool) -> None:
        """Take a draft of which so many tokens were right, and the next one wrong or not tried."""
        tried = accepted + was_rejected
        self._accepted = MEMORY**tried * self._accepted + accepted
        self._tried = MEMORY**tried * self._tried + tried

    def expected_tokens(self, num_drafted: int) -> float:
        """Expected number of new tokens of a verification: 1 + a + a^2 + ... + a^k, with a the rate, k drafted tokens.

        As of Leviathan et al., 2023 (arXiv:2211.17192), equation 1.
        """
        rate = self._accepted / self._tried
        return sum(rate**num for num in range(num_drafted + 1))


class Payoff:
    """Decides whether drafts are verified, and how many of their tokens, by what steps have taken so far.

    The predicted gain of verifying k tokens is E(k) * plain / (verify(k) + draft(k)): the tokens per row that are
    expected of it, times the time of a plain step, over its own time. Times are medians of the last steps over as many
    rows; a number of tokens that was not verified yet is taken to cost what the next smaller one does, so that it is
    tried. k is the one of the largest gain, of the powers of two. It is verified if the gain is above 1, as long as all
    verifications together have lost at most the share `LOSS` of the time and `FREE_STEPS` plain steps; and for a trial
    where the gain is lower, as long as the loss stays within the share alone. What is won makes up for what is lost
    later, up to `SAVED_STEPS`. A drafter that takes time to begin does so when these and the share `INVESTED` allow it.

    Args:
        warm_up: plain steps before the first draft, whose time is that of a plain step at first.
        always: verify every draft in full.

    Attributes:
        always: as given.
        rates: acceptance rate of each row.
    """

    def __init__(self, *, warm_up: int, always: bool = False) -> None:
        self.rates: defaultdict[RowId, AcceptanceRate] = defaultdict(AcceptanceRate)
        self.always = always
        self._warm_up = warm_up
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._draft_s: deque[float] = deque(maxlen=NUM_TIMES)
        self._may_lose_s = 0.0

    def is_warm(self, num_rows: int) -> bool:
        """Whether the time of a plain step of so many rows is known."""
        return self.always or len(self._seconds.get((num_rows, 0), ())) >= self._warm_up

    def may_begin(self, num_rows: int, seconds: float, num_left: int) -> bool:
        """Whether a drafter may take so many seconds to begin, with at most `num_left` tokens to come."""
        if self.always or not self.is_warm(num_rows):
            return self.always
        plain_s = self._known(num_rows, 0)
        return seconds < self._may_lose_s + (FREE_STEPS + INVESTED * num_left) * plain_s

    def add_beginning(self, num_rows: int, seconds: float, num_left: int) -> None:
        """Take the time in which a drafter began."""
        if not self.always:
            self._may_lose_s += LOSS * seconds + INVESTED * num_left * self._known(num_rows, 0) - seconds

    def num_to_verify(self, drafted: Sequence[tuple[RowId, int]], *, is_drafted: bool = True) -> int:
        """How many tokens of each draft to verify; 0 for a plain step.

        Args:
            drafted: each row with the number of tokens of its draft, or with most tokens of it.
            is_drafted: drafting has taken its time already.
        """
        longest = max(num for _, num in drafted)
        if self.always or longest == 0:
            return longest
        num_rows = len(drafted)
        plain_s, best, best_gain, best_loss_s = self._known(num_rows, 0), 0, 0.0, 0.0
        for num in (1 << power for power in range(longest.bit_length())):
            expected = sum(self.rates[row].expected_tokens(min(num, of_row)) for row, of_row in drafted) / num_rows
            seconds = self._known(num_rows, num) + (0.0 if is_drafted else num * self._drafting_s(plain_s))
            if (gain := expected * plain_s / seconds) > best_gain:
                best, best_gain, best_loss_s = num, gain, seconds - expected * plain_s
        self._may_lose_s = min(self._may_lose_s, SAVED_STEPS * plain_s)
        may_lose_s = self._may_lose_s + FREE_STEPS * plain_s
        if best_gain > 1:
            return best if may_lose_s > 0 else 0
        may_lose_s -= FREE_STEPS * plain_s
        return best if best_gain > LEAST_HOPE and best_loss_s < may_lose_s else 0

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """Take the time of a plain step."""
        self._note(num_rows, 0, seconds)

    def add_verification(self, num_rows: int, num: int, seconds: float, *, num_new: int, draft_s: float = 0.0) -> None:
        """Take the time of a verification of `num` tokens per row, and the new tokens of all rows that came of it."""
        self._note(num_rows, num, seconds)
        self._draft_s.append(draft_s / max(num, 1))
        self._may_lose_s += LOSS * draft_s
        if not self.always:
            self._may_lose_s -= seconds + draft_s - num_new / num_rows * self._known(num_rows, 0)

    def _note(self, num_rows: int, num: int, seconds: float) -> None:
        self._seconds.setdefault((num_rows, num), deque(maxlen=NUM_TIMES)).append(seconds)
        self._may_lose_s += LOSS * seconds

    def _drafting_s(self, plain_s: float) -> float:
        """Seconds of a drafted token."""
        return median(self._draft_s) if self._draft_s else DRAFT_COST * plain_s

    def _known(self, num_rows: int, num: int) -> float:
        """Seconds of a step with so many drafted tokens, or with the next smaller number that is known."""
        known = max(each for rows, each in self._seconds if rows == num_rows and each <= num)
        return median(self._seconds[num_rows, known])
