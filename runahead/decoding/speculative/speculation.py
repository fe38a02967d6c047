"""Speculative decoding: a cheap draft of several tokens, which one forward verifies; the tokens stay the same.

Every token is chosen by the row's sampler from the model's logits, as without speculation. A drafted token counts only
if it is the one that the sampler chooses; the first other one ends the draft. For a draft x that is looked up this is
the residual rule of speculative sampling (Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023,
arXiv:2302.01318) with the proposal q(x) = 1: x is accepted with probability p(x), and otherwise the token is drawn from
max(0, p - q), which is p without x, normalised. Drafts of a model or a policy are made with the draws that the sampler
is about to make. Since a sampler draws once per token, a seed gives the tokens that it gives without speculation,
whatever was drafted.
"""

# Legend: V vocabulary.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from runahead.config import Speculate
from runahead.decoding.decode import Decoded, Row
from runahead.decoding.sampling import next_tokens
from runahead.decoding.speculative.acceptance import accept
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts, Proposal
from runahead.decoding.speculative.verification import RowForwards
from runahead.report import SpeculationReport


class Speculation:
    """Speculative decoding of one batch, on the rank with the KV cache.

    Args:
        rows: one per prompt, without new tokens.
        forwards: over the prompts' KV cache.
        drafter: of the rows whose options ask for speculation.
        on_step: as of `decode`, but that a row without a new token in a step may have more of them later.
        token_s: as of `PayingDrafts`.

    Attributes:
        report: statistics so far.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        forwards: RowForwards,
        drafter: Drafter,
        on_step: Callable[[list[int | None]], Iterable[int]],
        *,
        token_s: float = 0.0,
    ) -> None:
        self._rows, self._forwards, self._on_step = rows, forwards, on_step
        asked = [row.options for row in rows if row.options.speculate is not Speculate.none]
        always = any(options.speculate_always for options in asked)
        self._paying = PayingDrafts(drafter, Payoff(warm_up=forwards.warm_up, always=always), token_s=token_s)
        self._texts = [list(row.prompt) for row in rows]
        self._last_token_s = 0.0
        self.report = SpeculationReport(drafts=asked[0].speculate.name)

    def decode(self, logits_BV: Tensor) -> Decoded:
        """Generate new tokens until every row has ended. `logits_BV` are those of the prompts' last tokens."""
        rows, everyone = self._rows, range(len(self._rows))
        self._tell(self._chosen(dict(zip(everyone, logits_BV, strict=True))))
        first_token_s = self._last_token_s
        while live := [row for row in everyone if rows[row].finish_reason is None]:
            texts, samplers = {row: self._texts[row] for row in live}, {row: rows[row].sampler for row in live}
            num_left = max(rows[row].max_new_tokens - len(rows[row].new_ids) for row in live)
            self.report.draft_s += self._paying.begin(len(live), num_left)
            proposal = self._paying.propose(texts, self._most(live), samplers)
            self._note_proposal(proposal)
            if proposal.num:
                self._verify(proposal.drafts, proposal.num, proposal.draft_s)
            else:
                self._plain(proposal.drafts)
        num_steps = max(len(row.new_ids) for row in rows)
        last_token_s = self._last_token_s
        return Decoded(rows=list(rows), first_token_s=first_token_s, last_token_s=last_token_s, num_steps=num_steps)

    def _most(self, live: Sequence[int]) -> dict[int, int]:
        """Most tokens of a draft of each row: one more token comes with it."""
        found = {}
        for number in live:
            row, options = self._rows[number], self._rows[number].options
            is_asked = options.speculate is not Speculate.none
            found[number] = min(options.speculate_tokens, row.max_new_tokens - len(row.new_ids) - 1) if is_asked else 0
        return found

    def _note_proposal(self, proposal: Proposal) -> None:
        self.report.draft_s += proposal.draft_s
        if proposal.is_declined:
            self.report.declined += 1
            if self.report.off_after is None:
                self.report.off_after = max(len(row.new_ids) for row in self._rows)

    def _plain(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Decode one token of each row, which tells of drafts, too, how right they would have been."""
        began_s = time.perf_counter()
        logits = self._forwards.plain({row: self._rows[row].new_ids[-1] for row in drafts})
        chosen = self._chosen(logits)
        seconds = time.perf_counter() - began_s
        self._paying.add_plain(drafts, chosen, seconds)
        self.report.add_plain(seconds)
        self._tell(chosen)

    def _verify(self, drafts: Mapping[int, Sequence[int]], num: int, draft_s: float) -> None:
        """Verify a draft of each row, of which some may be empty."""
        began_s = time.perf_counter()
        logits = self._forwards.verify({row: [self._rows[row].new_ids[-1], *draft] for row, draft in drafts.items()})
        seconds = time.perf_counter() - began_s

        def choose(at_place: dict[int, Tensor]) -> dict[int, int]:
            nonlocal seconds
            began_s = time.perf_counter()
            chosen = self._chosen(at_place)
            seconds += time.perf_counter() - began_s
            self._tell(chosen)
            return chosen

        outcome = accept(drafts, logits, choose, lambda row: self._rows[row].finish_reason is None)
        for row, num_unseen in outcome.unseen.items():
            self._forwards.take_back(row, num_unseen)
        self._paying.add_verified(drafts, num, outcome, seconds, draft_s=draft_s)
        self.report.add_verification(outcome.accepted, {row: len(draft) for row, draft in drafts.items()}, seconds)

    def _chosen(self, logits: Mapping[int, Tensor]) -> dict[int, int]:
        """The next tokens of rows, by their number, from the logits (V) of each."""
        samplers = [self._rows[row].sampler for row in logits]
        chosen = next_tokens(samplers, torch.stack(list(logits.values())))
        self._last_token_s = time.perf_counter()
        return {row: token for row, token in zip(logits, chosen, strict=True) if token is not None}

    def _tell(self, chosen: Mapping[int, int]) -> None:
        """Append new tokens to their rows, and tell of them."""
        tokens: list[int | None] = [None] * len(self._rows)
        for row, token in chosen.items():
            tokens[row] = self._rows[row].add(token)
            self._texts[row].append(int(token))
        for row in self._on_step(tokens):
            self._rows[row].cancel()
