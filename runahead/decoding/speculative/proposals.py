"""`PayingDrafts`: drafts of the rows that go on, and how many of their tokens to verify, if that pays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runahead.decoding.row import RowId
from runahead.decoding.sampling import Sampler
from runahead.decoding.speculative.acceptance import Acceptance
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.payoff import Payoff
from runahead.report import SpeculationReport

UNKNOWN = -1
"""No plain step has told yet what verifying drafts may cost, or there is not yet what they are made from."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafts of rows.

    Attributes:
        drafts: those to verify, some of them empty; before a plain step those that were made in any case.
        num: most tokens of a draft that is verified; 0 for a plain step.
        draft_s: seconds of drafting.
        is_declined: there are drafts, or might be, and verifying them would not pay.
    """

    drafts: dict[RowId, list[int]]
    num: int = 0
    draft_s: float = 0.0
    is_declined: bool = False

    @property
    def to_verify(self) -> dict[RowId, list[int]]:
        """The drafts, or empty ones for a plain step."""
        return self.drafts if self.num else {row: [] for row in self.drafts}


class PayingDrafts:
    """A drafter whose drafts are verified where that pays, by the times of the steps so far.

    Args:
        drafter: makes the drafts.
        payoff: decides.
        name: of the drafts, in the report.
        token_s: seconds of a token in a forward of the verifying model over many; 0 if that is not known.
        lead: the rank that decides, where several decode the rows.

    Attributes:
        drafter, payoff: as given.
        report: statistics so far.
        has_begun: `drafter` is prepared; until then there are no drafts.
    """

    def __init__(
        self, drafter: Drafter, payoff: Payoff, *, name: str, token_s: float = 0.0, lead: Lead = ALONE
    ) -> None:
        self.drafter, self.payoff, self._token_s, self._lead = drafter, payoff, token_s, lead
        self._drafts_here = lead.leads or drafter.runs_on_all
        self.report = SpeculationReport(drafts=name)
        self.has_begun, self._is_ready = drafter.is_free, True
        self._rests: dict[RowId, list[int]] = {}  # of drafts that were left out, whose tokens may come one by one

    def begin(self, num_rows: int, num_left: int) -> None:
        """Prepare the drafter where that is affordable.

        Args:
            num_left: most new tokens of a row that may come.
        """
        if self.has_begun:
            return
        self._is_ready = self.drafter.get_ready()
        expected_s = self.drafter.tokens_to_begin * self._token_s
        if not self._is_ready or not self._lead.number(self.payoff.may_begin(num_rows, expected_s, num_left)):
            return
        began_s = time.perf_counter()
        self.prepare()
        seconds = time.perf_counter() - began_s
        self.payoff.add_beginning(num_rows, seconds, num_left)
        self.report.draft_s += seconds

    def prepare(self) -> None:
        """Prepare the drafter, whatever that costs."""
        if self._drafts_here:
            self.drafter.begin()
        self.has_begun = True
        self.report.within = self.drafter.within

    def propose(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> Proposal:
        """Drafts of the rows that are decoded together; arguments as of `Drafter.draft`."""
        proposal = self._proposal(texts, most, samplers)
        self.report.draft_s += proposal.draft_s
        self.report.declined += proposal.is_declined
        return proposal

    def _proposal(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> Proposal:
        drafts, draft_s, is_free = {row: list[int]() for row in texts}, 0.0, self.drafter.is_free
        if is_free:
            drafts, draft_s = self._drafted(texts, most, samplers)
        longest = {row: len(draft) for row, draft in drafts.items()} if is_free else most
        if not any(num > 0 for num in longest.values()):
            return Proposal(drafts=drafts, draft_s=draft_s)
        num = self._lead.number(self._num_to_verify(longest))
        if num == UNKNOWN:
            return Proposal(drafts=drafts, draft_s=draft_s)
        if num == 0:
            return Proposal(drafts=drafts, draft_s=draft_s, is_declined=True)
        if not is_free:
            most = {row: min(num, each) for row, each in most.items()}
            drafts, draft_s = self._drafted(texts, most, samplers)
            drafts = self._lead.drafts(drafts, most)
        return Proposal(drafts={row: draft[:num] for row, draft in drafts.items()}, num=num, draft_s=draft_s)

    def note(self, proposal: Proposal, acceptance: Acceptance, seconds: float) -> None:
        """Take the step that followed a proposal, which took `seconds`.

        A plain step tells of drafts, too, how right they would have been.
        """
        drafts, rates = proposal.drafts, self.payoff.rates
        if proposal.num == 0:
            self.report.add_plain(seconds)
            self.payoff.add_plain(len(drafts), seconds)
            for row, token in acceptance.first.items():
                if rest := self._rests.get(row) or list(drafts[row]):
                    is_right = token == rest[0]
                    rates[row].add(int(is_right), was_rejected=not is_right)
                    self._rests[row] = rest[1:] if is_right else []
            return
        lengths = [(len(draft), acceptance.accepted[row]) for row, draft in drafts.items()]
        self.report.add_verification(lengths, seconds)
        self.payoff.add_verification(
            len(drafts), proposal.num, seconds, num_new=acceptance.num_new, draft_s=proposal.draft_s
        )
        for row, draft in drafts.items():
            self._rests.pop(row, None)
            if draft:
                rates[row].add(acceptance.accepted[row], was_rejected=row in acceptance.rejected)

    def leave(self, row: RowId) -> None:
        """Forget a row that has ended."""
        self.drafter.leave(row)
        self._rests.pop(row, None)
        self.payoff.rates.pop(row, None)

    def _drafted(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> tuple[dict[RowId, list[int]], float]:
        began_s = time.perf_counter()
        if not self._drafts_here and not self.drafter.is_free:
            return {row: [] for row in texts}, 0.0
        drafts = self.drafter.draft(texts, most, samplers)
        return drafts, time.perf_counter() - began_s

    def _num_to_verify(self, longest: Mapping[RowId, int]) -> int:
        """How many tokens to verify of drafts of these lengths, by this rank's clock; UNKNOWN before it can tell."""
        if not self.payoff.is_warm(len(longest)):
            return UNKNOWN
        if not self.has_begun:
            return 0 if self._is_ready else UNKNOWN
        lengths = [(row, max(0, each)) for row, each in longest.items()]
        return self.payoff.num_to_verify(lengths, is_drafted=self.drafter.is_free)
