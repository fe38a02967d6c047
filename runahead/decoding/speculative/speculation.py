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
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.verification import RowForwards
from runahead.report import SpeculationReport


class Speculation:
    """Speculative decoding of one batch, on the rank with the KV cache.

    Args:
        rows: one per prompt, without new tokens.
        forwards: over the prompts' KV cache.
        drafter: of the rows whose options ask for speculation.
        on_step: as of `decode`, but that a row without a new token in a step may have more of them later.

    Attributes:
        report: statistics so far.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        forwards: RowForwards,
        drafter: Drafter,
        on_step: Callable[[list[int | None]], Iterable[int]],
    ) -> None:
        self._rows, self._forwards, self._drafter, self._on_step = rows, forwards, drafter, on_step
        asked = [row.options for row in rows if row.options.speculate is not Speculate.none]
        always = any(options.speculate_always for options in asked)
        self._payoff = Payoff(len(rows), warm_up=forwards.warm_up, always=always)
        self._declined: list[list[int]] = [[] for _ in rows]  # the rest of a draft whose tokens come one by one
        self._texts = [list(row.prompt) for row in rows]
        self._last_token_s = 0.0
        self.report = SpeculationReport(drafts=asked[0].speculate.name)

    def decode(self, logits_BV: Tensor) -> Decoded:
        """Generate new tokens until every row has ended. `logits_BV` are those of the prompts' last tokens."""
        rows, everyone = self._rows, range(len(self._rows))
        self._tell(self._chosen(dict(zip(everyone, logits_BV, strict=True))))
        first_token_s, began_s = self._last_token_s, time.perf_counter()
        self._drafter.begin()
        self.report.draft_s += time.perf_counter() - began_s
        while live := [row for row in everyone if rows[row].finish_reason is None]:
            most = self._most(live)
            drafts, draft_s = self._drafted(most) if self._drafter.is_free else ({row: [] for row in live}, 0.0)
            num = self._num_to_verify({row: len(drafts[row]) for row in live} if self._drafter.is_free else most)
            if num and not self._drafter.is_free:
                drafts, draft_s = self._drafted({row: min(num, most[row]) for row in live})
            if num:
                self._verify({row: draft[:num] for row, draft in drafts.items()}, num, draft_s)
            else:
                self._plain(drafts)
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

    def _drafted(self, most: Mapping[int, int]) -> tuple[dict[int, list[int]], float]:
        """Drafts of at most so many tokens, by row, and the seconds that they took."""
        began_s = time.perf_counter()
        drafts = self._drafter.draft({row: self._texts[row] for row in most}, most)
        draft_s = time.perf_counter() - began_s
        self.report.draft_s += draft_s
        return drafts, draft_s

    def _num_to_verify(self, longest: Mapping[int, int]) -> int:
        """How many tokens of each draft to verify, of those that it has or may have; 0 for a plain step."""
        if not any(longest.values()) or not self._payoff.is_warm(len(longest)):
            return 0
        num = self._payoff.num_to_verify(list(longest.items()), is_drafted=self._drafter.is_free)
        if num == 0:
            self.report.declined += 1
            if self.report.off_after is None:
                self.report.off_after = max(len(row.new_ids) for row in self._rows)
        return num

    def _plain(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Decode one token of each row, which tells of drafts, too, how right they would have been."""
        began_s = time.perf_counter()
        logits = self._forwards.plain({row: self._rows[row].new_ids[-1] for row in drafts})
        chosen = self._chosen(logits)
        seconds = time.perf_counter() - began_s
        self._payoff.add_plain(len(drafts), seconds)
        self.report.plain_steps += 1
        self.report.plain_s += seconds
        for row, draft in drafts.items():
            rest = self._declined[row] or list(draft)
            if rest:
                is_right = chosen[row] == rest[0]
                self._payoff.rates[row].add(int(is_right), was_rejected=not is_right)
                self._declined[row] = rest[1:] if is_right else []
        self._tell(chosen)

    def _verify(self, drafts: Mapping[int, Sequence[int]], num: int, draft_s: float) -> None:
        """Verify a draft of each row, of which some may be empty."""
        began_s = time.perf_counter()
        logits = self._forwards.verify({row: [self._rows[row].new_ids[-1], *draft] for row, draft in drafts.items()})
        seconds, num_new, place = time.perf_counter() - began_s, 0, 0
        unseen = {row: len(draft) + 1 for row, draft in drafts.items()}  # tokens after which nothing was chosen
        accepted, rejected, going_on = dict.fromkeys(drafts, 0), set[int](), list(drafts)
        while going_on:
            began_s = time.perf_counter()
            chosen = self._chosen({row: logits[row][place] for row in going_on})
            seconds += time.perf_counter() - began_s
            self._tell(chosen)
            num_new += len(chosen)
            going_on = []
            for row, token in chosen.items():
                unseen[row] -= 1
                if place < len(drafts[row]) and token != drafts[row][place]:
                    rejected.add(row)
                elif place < len(drafts[row]):
                    accepted[row] += 1
                    if self._rows[row].finish_reason is None:
                        going_on.append(row)
            place += 1
        for row, num_unseen in unseen.items():
            self._forwards.take_back(row, num_unseen)
        self._payoff.add_verification(len(drafts), num, seconds, num_new=num_new, draft_s=draft_s)
        self._note(drafts, accepted, rejected, seconds)

    def _note(
        self, drafts: Mapping[int, Sequence[int]], accepted: Mapping[int, int], rejected: set[int], seconds: float
    ) -> None:
        """Take the outcome of a verification into the acceptance rates and the report."""
        report = self.report
        report.verifications += 1
        report.verify_s += seconds
        for row, draft in drafts.items():
            self._declined[row] = []
            if not draft:
                continue
            self._payoff.rates[row].add(accepted[row], was_rejected=row in rejected)
            report.drafted += len(draft)
            report.accepted += accepted[row]
            report.accepted_lengths += [0] * (accepted[row] + 1 - len(report.accepted_lengths))
            report.accepted_lengths[accepted[row]] += 1

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
