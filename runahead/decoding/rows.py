"""`Rows`: the one loop of new tokens. Rows join after their prefill, get their next tokens by steps, and leave.

A step is a forward of one token per row, or, with drafts, of several that it verifies. Every token is chosen by the
row's sampler from the model's logits, and a drafted token counts only if it is the one that the sampler chooses; the
first other one ends the draft. For a draft x that is looked up this is the residual rule of speculative sampling
(Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318) with the proposal q(x) = 1: x is
accepted with probability p(x), and otherwise the token is drawn from max(0, p - q), which is p without x, normalised.
Drafts of a model or a policy are made with the draws that the sampler is about to make. Since a sampler draws once per
token, a seed gives the tokens that it gives without speculation, whatever was drafted.
"""

# Legend: B rows of a prompt batch or of a forward, V vocabulary.

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from runahead.cache.base import KVStore
from runahead.decoding.lanes import Lane, Lanes
from runahead.decoding.row import NewToken, Row, RowId, batch_ids
from runahead.decoding.sampling import NOT_NUMBERS, Sampler, next_tokens
from runahead.decoding.speculative.acceptance import Acceptance
from runahead.decoding.speculative.proposals import PayingDrafts, Proposal

Anew = Callable[[Lanes, Mapping[RowId, Row]], tuple[Tensor | None, Lanes]]
"""Computes the texts of rows that lanes hold anew, as those of prompts -> logits (B, V) after each, None on a rank that
is told the tokens, and the lanes that hold the rows then. Other rows may be stepped meanwhile."""

Choose = Callable[[Sequence[Sampler | None], Tensor | None], list[int | None]]
"""Samplers of the rows, None for those that have ended, and logits (B, V), None on a rank that is told the tokens ->
the next token of every row, as `next_tokens`. All ranks that decode the rows get the same."""


def choose_alone(samplers: Sequence[Sampler | None], logits_BV: Tensor | None) -> list[int | None]:
    """`Choose` of a rank that decodes by itself, or with the other shares of its stage, which get the same logits."""
    assert logits_BV is not None, "another rank chooses"
    return next_tokens(samplers, logits_BV)


@dataclass(kw_only=True)
class Decoded:
    """Rows that have ended, with the seconds of `time.perf_counter` at the first and the last token.

    Attributes:
        step_s: seconds of a step, the median; None if there was none, or rows do more than to take the largest logit.
        num_steps: tokens of the longest row.
        num_bytes: bytes of the rows' keys and values at the end.
        drafts: that were made for them, if any row asked for drafts.
    """

    rows: list[Row]
    first_token_s: float
    last_token_s: float
    step_s: float | None
    num_steps: int
    num_bytes: int
    drafts: PayingDrafts | None

    @property
    def seen_texts(self) -> list[list[int]]:
        """Prompts and answers, but for the last token of each, which no forward has seen."""
        return [row.prompt + row.new_ids[:-1] for row in self.rows]


class Rows:
    """The rows that this rank decodes. All ranks that decode them make the same calls.

    A row whose logits are no numbers ends alone, with the error NOT_NUMBERS.

    Args:
        lanes: where their keys and values are.
        choose: chooses the tokens of a step, of which all ranks hear.
        drafts: for the rows that ask for them; None for none.
        anew: for rows that outgrow the tables by which LongRoPE has rotated their keys; None: no model has these.
        on_leave: called with every row that leaves.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        choose: Choose = choose_alone,
        drafts: PayingDrafts | None = None,
        anew: Anew | None = None,
        on_leave: Callable[[RowId, Row, Lane], object] = lambda id, row, lane: None,
    ) -> None:
        self._lanes, self._choose, self._drafts, self._on_leave = lanes, choose, drafts, on_leave
        self._anew = anew
        self._rows: dict[RowId, Row] = {}
        self._away: dict[RowId, Row] = {}  # which are computed anew
        self._is_in_step = False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows' keys and values, of what rows share once."""
        return self._lanes.num_bytes

    def trim(self, num_tokens: int, most_tokens: int) -> None:
        """Give back memory that no row needs; as `Lanes.trim`."""
        self._lanes.trim(num_tokens, most_tokens)

    def join(
        self,
        ids: Sequence[RowId],
        rows: Sequence[Row],
        logits_BV: Tensor,
        cache: KVStore,
        lengths: Sequence[int],
        prompt_of: Sequence[int] | None = None,
    ) -> list[NewToken]:
        """Choose the first tokens of the rows of a prompt batch. Rows that do not end with them go on.

        Args:
            ids: names of the rows.
            rows: without new tokens.
            logits_BV: of the prompts' last tokens.
            cache: of the prompts, padded on the left to the longest.
            lengths: tokens of each prompt that the cache stores; reused ones are not in it.
            prompt_of: number of each row's prompt; by default every row has a prompt of its own.
        """
        prompt_of = list(range(len(rows)) if prompt_of is None else prompt_of)
        self._lanes.join(ids, rows, cache, lengths, prompt_of)
        new = _next(ids, rows, self._choose, logits_BV if len(rows) == len(lengths) else logits_BV[prompt_of])
        self.take(ids, rows)
        return new

    def take(self, ids: Sequence[RowId], rows: Sequence[Row]) -> None:
        """Take rows that the lanes hold and that have their first tokens. Those that ended with them leave."""
        for id, row in zip(ids, rows, strict=True):
            self._rows[id] = row
            if self._drafts is not None and row.options.asks_for_drafts:
                self._drafts.drafter.join(id, row)
        self._let_leave()

    def step(self, tell: Callable[[list[NewToken]], object] = lambda new: None) -> list[list[NewToken]]:
        """Give every row its next token, or several where drafts are right. Rows that end leave.

        Where rows outgrow their rotary tables, a step computes them anew, and gives no token to others.

        Args:
            tell: called with the tokens of each place of the drafts as they are chosen. It may cancel rows.

        Returns:
            the tokens of each place: the next one of every row, then the second ones of some.
        """
        if not self._rows:
            return []
        if outgrown := self._lanes.outgrown(self._rows):
            return self._step_anew(outgrown, tell)
        self._is_in_step = True
        try:
            places = self._step(tell)
        finally:
            self._is_in_step = False
        self._let_leave()
        return places

    def _step(self, tell: Callable[[list[NewToken]], object]) -> list[list[NewToken]]:
        """A step, after which no row has left."""
        proposal = self._proposal()
        began_s, told_s, places = time.perf_counter(), 0.0, list[list[NewToken]]()
        order, logits_BV, verified = self._forward(proposal)
        acceptance = Acceptance(proposal.to_verify if proposal is not None else dict.fromkeys(self._rows, ()))
        while order:
            new = _next(order, [self._rows.get(id) for id in order], self._choose, logits_BV)
            acceptance.take({each.row: each.token for each in new})
            places.append(new)
            chosen_s = time.perf_counter()
            tell(new)
            told_s += time.perf_counter() - chosen_s
            order = [row for row in acceptance.going_on if self._rows[row].finish_reason is None]
            if order:
                logits_BV = torch.stack([verified[row][acceptance.place] for row in order])
        for row, num_unseen in acceptance.unseen.items():
            self._lanes.take_back(row, num_unseen)
        if self._drafts is not None and proposal is not None:
            self._drafts.note(proposal, acceptance, time.perf_counter() - began_s - told_s)
        return places

    def _step_anew(self, ids: Sequence[RowId], tell: Callable[[list[NewToken]], object]) -> list[list[NewToken]]:
        """Compute rows anew, and choose their next tokens."""
        assert self._anew is not None, "LongRoPE needs a way to compute texts anew"
        rows = {id: self._rows.pop(id) for id in ids}
        self._away |= rows
        logits_BV, self._lanes = self._anew(self._lanes, rows)
        for id, row in rows.items():
            del self._away[id]
            if row.finish_reason is None:
                self._rows[id] = row
        new = _next(ids, [self._rows.get(id) for id in ids], self._choose, logits_BV)
        self._rows |= rows
        if new:
            tell(new)
        self._let_leave()
        return [new] if new else []

    def cancel(self, ids: Collection[RowId]) -> list[RowId]:
        """Let rows end and leave, those that are here and have not ended. Returns their ids."""
        rows = self._rows | self._away
        found = [id for id in dict.fromkeys(ids) if id in rows and rows[id].finish_reason is None]
        for id in found:
            rows[id].end("cancelled")
        if found and not self._is_in_step:  # else they leave with those that end in it
            self._let_leave()
        return found

    def _proposal(self) -> Proposal | None:
        """Drafts of all rows, some of them empty; None if no row asks for drafts."""
        asking = [row for row in self._rows.values() if row.options.asks_for_drafts]
        drafts = self._drafts
        if drafts is None or not asking:
            return None
        drafts.payoff.always = any(row.options.speculate_always for row in asking)
        drafts.begin(len(self._rows), max(row.num_left for row in self._rows.values()))
        at_once = self._lanes.most_at_once(self._rows)
        most = {  # one more token comes with a draft
            id: min(row.options.speculate_tokens, (at_once or row.num_left) - 1, row.num_left - 1)
            if row.options.asks_for_drafts
            else 0
            for id, row in self._rows.items()
        }
        samplers = {id: row.sampler for id, row in self._rows.items()}
        proposal = drafts.propose({id: row.ids for id, row in self._rows.items()}, most, samplers)
        if proposal.is_declined and drafts.report.off_after is None:
            drafts.report.off_after = max(len(row.new_ids) for row in self._rows.values())
        return proposal

    def _forward(self, proposal: Proposal | None) -> tuple[list[RowId], Tensor, Mapping[RowId, Tensor]]:
        """Logits (B, V) after the rows' last tokens, the rows of them, and logits after each token that is verified."""
        if proposal is None or proposal.num == 0:
            return *self._lanes.plain({id: row.ids[-1] for id, row in self._rows.items()}), {}
        drafts = proposal.drafts
        self._lanes.keep(row for row, draft in drafts.items() if draft)
        verified = self._lanes.verify({id: [row.ids[-1], *drafts[id]] for id, row in self._rows.items()})
        return list(verified), torch.stack([logits_CV[0] for logits_CV in verified.values()]), verified

    def _let_leave(self) -> None:
        """Let rows that have ended leave."""
        for id in [id for id, row in self._rows.items() if row.finish_reason is not None]:
            row = self._rows.pop(id)
            if self._drafts is not None:
                self._drafts.leave(id)
            self._on_leave(id, row, self._lanes.leave(id, row.ids[-1]))


def decode(
    rows: Sequence[Row],
    logits_BV: Tensor | None,
    hold: Callable[[], tuple[Lanes, PayingDrafts | None]],
    *,
    choose: Choose = choose_alone,
    anew: Anew | None = None,
    on_step: Callable[[list[int | None]], Iterable[int]] = lambda tokens: (),
    on_leave: Callable[[RowId, Row, Lane], object] = lambda id, row, lane: None,
) -> Decoded:
    """Generate from all rows of a batch until each has ended.

    Args:
        rows: one per prompt, without new tokens.
        logits_BV: of the prompts' last tokens; None on a rank that is told the tokens.
        hold: returns lanes that hold the rows, with their drafts. It is called once the first tokens are there.
        choose, anew, on_leave: as of `Rows`.
        on_step: called with the tokens of each step, or of each place of the drafts in it: None for rows that have none
            there. Returns the rows to cancel.

    Raises:
        ValueError: logits are no numbers.
    """
    ids, token_s = batch_ids(len(rows)), list[float]()
    is_plain = all(row.sampler.takes_largest and row.sampler.num_logprobs is None for row in rows)

    def tell(new: Sequence[NewToken]) -> None:
        token_s.append(time.perf_counter())
        if any(each.token is None for each in new):
            raise ValueError(NOT_NUMBERS)
        found = {each.row: each.token for each in new}
        for row in on_step([found.get(id) for id in ids]):
            rows[row].end("cancelled")

    tell(_next(ids, rows, choose, logits_BV))
    lanes, drafts = hold()
    live = Rows(lanes, choose=choose, drafts=drafts, anew=anew, on_leave=on_leave)
    live.take(ids, rows)
    while live:
        live.step(tell)
    return Decoded(
        rows=list(rows),
        first_token_s=token_s[0],
        last_token_s=token_s[-1],
        step_s=median(end - begin for begin, end in pairwise(token_s)) if is_plain and len(token_s) > 1 else None,
        num_steps=max(len(row.new_ids) for row in rows),
        num_bytes=live.num_bytes,
        drafts=drafts,
    )


def _next(ids: Sequence[RowId], rows: Sequence[Row | None], choose: Choose, logits_BV: Tensor | None) -> list[NewToken]:
    """Choose the next tokens of rows, and append them. Rows that have left their batch, None, have none."""
    found = list[NewToken]()
    chosen = choose([None if row is None else row.sampler for row in rows], logits_BV)
    for id, row, token in zip(ids, rows, chosen, strict=True):
        if row is None:
            continue
        if token is None:
            row.end(NOT_NUMBERS)
        else:
            row.add(token)
        found.append(NewToken(id, token, row.finish_reason))
    return found
