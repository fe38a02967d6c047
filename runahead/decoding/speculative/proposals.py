"""`PayingDrafts`: drafts of the rows that go on, and how many of their tokens to verify, if that pays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runahead.decoding.sampling import Sampler
from runahead.decoding.speculative.acceptance import Outcome
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.payoff import Payoff


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafts of rows.

    Attributes:
        drafts: those to verify, some of them empty; before a plain step those that were made in any case.
        num: most tokens of a draft that is verified; 0 for a plain step.
        draft_s: seconds of drafting.
        is_declined: there are drafts, or might be, and verifying them would not pay.
    """

    drafts: dict[int, list[int]]
    num: int = 0
    draft_s: float = 0.0
    is_declined: bool = False


class PayingDrafts:
    """A drafter whose drafts are verified where that pays, by the times of the steps so far.

    Args:
        drafter: makes the drafts.
        payoff: decides.
        token_s: seconds of a token in a forward of the verifying model over many; 0 if that is not known.

    Attributes:
        has_begun: `drafter` is prepared; until then there are no drafts.
    """

    def __init__(self, drafter: Drafter, payoff: Payoff, *, token_s: float = 0.0) -> None:
        self.drafter, self._payoff, self._token_s = drafter, payoff, token_s
        self.has_begun = drafter.is_free
        self._rests: dict[int, list[int]] = {}  # of drafts that were left out, whose tokens may come one by one

    def begin(self, num_rows: int, num_left: int) -> float:
        """Prepare the drafter where that is affordable. Returns the seconds that it took.

        Args:
            num_left: most new tokens of a row that may come.
        """
        expected_s = self.drafter.tokens_to_begin * self._token_s
        if self.has_begun or not self._payoff.may_begin(num_rows, expected_s, num_left):
            return 0.0
        began_s = time.perf_counter()
        self.drafter.begin()
        seconds = time.perf_counter() - began_s
        self._payoff.add_beginning(num_rows, seconds, num_left)
        self.has_begun = True
        return seconds

    def propose(
        self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int], samplers: Mapping[int, Sampler]
    ) -> Proposal:
        """Drafts of the rows that are decoded together; arguments as of `Drafter.draft`."""
        drafts, draft_s, is_free = {row: list[int]() for row in texts}, 0.0, self.drafter.is_free
        if is_free:
            drafts, draft_s = self._drafted(texts, most, samplers)
        longest = {row: len(draft) for row, draft in drafts.items()} if is_free else most
        if not any(num > 0 for num in longest.values()) or not self._payoff.is_warm(len(longest)):
            return Proposal(drafts=drafts, draft_s=draft_s)
        if not self.has_begun:
            return Proposal(drafts=drafts, is_declined=True)
        num = self._payoff.num_to_verify([(row, max(0, each)) for row, each in longest.items()], is_drafted=is_free)
        if num == 0:
            return Proposal(drafts=drafts, draft_s=draft_s, is_declined=True)
        if not is_free:
            drafts, draft_s = self._drafted(texts, {row: min(num, each) for row, each in most.items()}, samplers)
        return Proposal(drafts={row: draft[:num] for row, draft in drafts.items()}, num=num, draft_s=draft_s)

    def add_plain(self, drafts: Mapping[int, Sequence[int]], chosen: Mapping[int, int], seconds: float) -> None:
        """Take a plain step, which tells of drafts how right they would have been."""
        self._payoff.add_plain(len(drafts), seconds)
        for row, draft in drafts.items():
            rest = self._rests.get(row) or list(draft)
            if rest and row in chosen:
                is_right = chosen[row] == rest[0]
                self._payoff.rates[row].add(int(is_right), was_rejected=not is_right)
                self._rests[row] = rest[1:] if is_right else []

    def add_verified(
        self, drafts: Mapping[int, Sequence[int]], num: int, outcome: Outcome, seconds: float, *, draft_s: float
    ) -> None:
        """Take a verification of at most `num` tokens of each draft."""
        self._payoff.add_verification(len(drafts), num, seconds, num_new=outcome.num_new, draft_s=draft_s)
        for row, draft in drafts.items():
            self._rests.pop(row, None)
            if draft:
                self._payoff.rates[row].add(outcome.accepted[row], was_rejected=row in outcome.rejected)

    def forget(self, row: int) -> None:
        """Forget a row that has ended."""
        self._rests.pop(row, None)
        self._payoff.rates.pop(row, None)

    def _drafted(
        self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int], samplers: Mapping[int, Sampler]
    ) -> tuple[dict[int, list[int]], float]:
        began_s = time.perf_counter()
        drafts = self.drafter.draft(texts, most, samplers)
        return drafts, time.perf_counter() - began_s
