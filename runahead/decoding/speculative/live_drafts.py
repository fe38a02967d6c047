"""Look-up for rows that join and leave between two steps, as those of a server do: each has a draft of its own."""

# Legend: V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter

import torch
from torch import Tensor

from runahead.config import Speculate
from runahead.decoding.live_rows import Group, LiveRow, LiveRows, NewToken, RowId
from runahead.decoding.speculative.acceptance import accept
from runahead.decoding.speculative.drafts import LookupDrafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.decoding.speculative.verification import verified
from runahead.model.model import Model
from runahead.report import SpeculationReport
from runahead.thinning.rank_policies import RankPolicies

WARM_UP = 2
"""Plain steps with a number of rows before the first draft for as many."""


class DraftedRows(LiveRows):
    """Rows of which those that ask for look-up get several tokens in a step where that pays.

    A forward has as many tokens per row as the longest draft. Rows accept different numbers of them, and then have
    different lengths, which a row's cache of its own allows.

    Attributes:
        report: statistics of all rows so far.
    """

    def __init__(
        self, model: Model, policies: RankPolicies, on_leave: Callable[[LiveRow], object] = lambda row: None
    ) -> None:
        super().__init__(model, policies, on_leave)
        self._drafter, self._payoff = LookupDrafter({}), Payoff(warm_up=WARM_UP)
        self._paying = PayingDrafts(self._drafter, self._payoff)
        self._texts: dict[int, list[int]] = {}  # of rows that ask for look-up
        self.report = SpeculationReport(drafts=Speculate.lookup.name)

    def _step(self, group: Group) -> list[NewToken]:
        rows = {each.number: each for each in group.rows}
        asking = [each for each in group.rows if each.row.options.speculate is Speculate.lookup]
        if not asking:
            return super()._step(group)
        for each in asking:
            self._follow(each)
        most = {number: _most(each) for number, each in rows.items()}
        samplers = {number: each.row.sampler for number, each in rows.items()}
        texts = {number: self._texts.get(number, []) for number in rows}
        proposal = self._paying.propose(texts, most, samplers)
        self.report.draft_s += proposal.draft_s
        self.report.declined += proposal.is_declined
        if proposal.num:
            return self._verify(rows, proposal.drafts, proposal.num, proposal.draft_s)
        began_s = perf_counter()
        found = super()._step(group)
        seconds = perf_counter() - began_s
        number_of = {each.id: each.number for each in group.rows}
        chosen = {number_of[new.row]: new.token for new in found if new.token is not None and new.ended is None}
        self._paying.add_plain(proposal.drafts, chosen, seconds)
        self.report.add_plain(seconds)
        return found

    def drop(self, ids: Collection[RowId]) -> list[RowId]:
        numbers = [self._live[id].number for id in ids if id in self._live]
        dropped = super().drop(ids)
        for number in numbers:
            self._texts.pop(number, None)
            self._drafter.leave(number)
            self._paying.forget(number)
        return dropped

    def _follow(self, each: LiveRow) -> None:
        """Take the new tokens of a row into its text."""
        row, options = each.row, each.row.options
        if each.number not in self._texts:
            self._texts[each.number] = list(row.prompt)
            self._drafter.join(each.number, options.speculate_match)
            self._payoff.always = options.speculate_always
        text = self._texts[each.number]
        text += row.new_ids[len(text) - len(row.prompt) :]

    def _verify(
        self, rows: dict[int, LiveRow], drafts: dict[int, list[int]], num: int, draft_s: float
    ) -> list[NewToken]:
        """Verify a draft of each row, of which some may be empty."""
        began_s, found = perf_counter(), list[NewToken]()
        ids = [[each.row.new_ids[-1], *drafts[number]] for number, each in rows.items()]
        stored = {number: each.num_tokens for number, each in rows.items()}
        of_rows = verified(self._model, [each.cache for each in rows.values()], list(stored.values()), ids)
        self._groups = None  # rows are at other distances from each other than they were

        def choose(at_place: dict[int, Tensor]) -> dict[int, int]:
            for number in at_place:
                rows[number].num_tokens += 1  # before rows leave, and what they stored is kept
            new = self._add([rows[number] for number in at_place], torch.stack(list(at_place.values())))
            found.extend(new)
            return {number: each.token for number, each in zip(at_place, new, strict=True) if each.token is not None}

        logits = dict(zip(rows, of_rows, strict=True))
        outcome = accept(drafts, logits, choose, lambda number: rows[number].row.finish_reason is None)
        for number, num_unseen in outcome.unseen.items():
            rows[number].cache.take_back(num_unseen)
        seconds = perf_counter() - began_s
        self._paying.add_verified(drafts, num, outcome, seconds, draft_s=draft_s)
        self.report.add_verification(outcome.accepted, {row: len(draft) for row, draft in drafts.items()}, seconds)
        for new in found:
            if new.ended is not None:
                self._paying.forget(next(number for number, each in rows.items() if each.id == new.row))
        return found


def _most(each: LiveRow) -> int:
    """Most tokens of a row's draft: one more token comes with it."""
    row, options = each.row, each.row.options
    if options.speculate is not Speculate.lookup:
        return 0
    return min(options.speculate_tokens, row.max_new_tokens - len(row.new_ids) - 1)
