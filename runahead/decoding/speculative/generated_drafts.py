"""Drafts that a cheaper forward generates: of a smaller model, or of the model itself over a part of its KV cache."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from policies.row_values import sent
from runahead.attention.causal import nothing
from runahead.cache.attention import CausalAttention
from runahead.decoding.decode import Row
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.speculative.acceptance import Outcome, accept
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts, Proposal
from runahead.decoding.speculative.verification import RowForwards
from runahead.model.model import Model
from runahead.report import SpeculationReport

CHUNK_TOKENS = 512
"""Tokens of a prompt that a smaller model computes at a time."""


class GeneratedDrafter(Drafter):
    """Drafts by generating from forwards of its own, with the draws that the rows' samplers are about to make.

    Another drafter may draft for this one: then one of its forwards verifies several tokens, and those stay that it
    would have generated itself.

    Args:
        rows: of the batch, before their first token.
        first: drafts for this drafter; None lets it generate a token per forward.

    Attributes:
        within: statistics of those drafts; None without `first`.
    """

    is_free = False

    def __init__(self, rows: Sequence[Row], first: Drafter | None = None) -> None:
        self._rows, self._first = rows, first
        self._forwards: RowForwards | None = None
        self._fed: list[list[int]] = []  # whose keys and values are stored
        self._paying: PayingDrafts | None = None
        self.within: SpeculationReport | None = None

    @abstractmethod
    def _made(self, texts: Sequence[Sequence[int]]) -> RowForwards:
        """The forwards, with these tokens of each row stored."""

    @property
    def num_bytes(self) -> int:
        own = 0 if self._forwards is None else self._forwards.cache.num_bytes
        return own + (0 if self._first is None else self._first.num_bytes)

    @property
    def tokens_to_begin(self) -> float:
        return 0.0 if self._first is None else self._first.tokens_to_begin

    def begin(self) -> None:
        self._fed = [[*row.prompt, *row.new_ids[:-1]] for row in self._rows]
        self._forwards = self._made(self._fed)
        self._forwards.leave_step()
        if self._first is not None:
            always = any(row.options.speculate_always for row in self._rows)
            self._paying = PayingDrafts(self._first, Payoff(warm_up=self._forwards.warm_up, always=always))
            self._first.begin()
            self._paying.has_begun = True
            self.within = SpeculationReport(drafts="lookup" if self._first.is_free else "model")

    def draft(
        self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int], samplers: Mapping[int, Sampler]
    ) -> dict[int, list[int]]:
        drafts = {row: list[int]() for row in texts}
        asked = [row for row in texts if most[row] > 0]
        ahead = {row: samplers[row].ahead() for row in asked}
        new = {row: self._to_feed(row, texts[row]) for row in asked}
        while new:
            going_on = {row: [*texts[row], *drafts[row]] for row in new}
            made = self._round(new, going_on, {row: most[row] - len(drafts[row]) for row in new}, ahead)
            for row, tokens in made.items():
                drafts[row] += tokens
            new = {row: tokens[-1:] for row, tokens in made.items() if len(drafts[row]) < most[row]}
        for row in asked:
            self._fed[row] = [*texts[row], *drafts[row][:-1]]
        return drafts

    def _to_feed(self, row: int, text: Sequence[int]) -> Sequence[int]:
        """The last tokens of a row's text, those that are not stored; wrong drafts are taken back."""
        assert self._forwards is not None, "begin() comes first"
        fed = self._fed[row]
        num_right = min(_num_common(fed, text), len(text) - 1)  # the last token is fed in any case
        self._forwards.take_back(row, len(fed) - num_right)
        return text[num_right:]

    def _round(
        self,
        new: Mapping[int, Sequence[int]],
        texts: Mapping[int, Sequence[int]],
        most: Mapping[int, int],
        samplers: Mapping[int, Sampler],
    ) -> dict[int, list[int]]:
        """One forward: the next tokens of each row, at least one.

        Args:
            new: last tokens of each text, those that are not stored.
            texts: of each row, with what is drafted so far.
            most: most tokens that may come.
            samplers: copies, which choose the tokens.
        """
        forwards, made = self._forwards, {row: list[int]() for row in new}
        assert forwards is not None, "begin() comes first"
        proposal = Proposal(drafts={row: [] for row in new})
        if self._paying is not None:
            proposal = self._paying.propose(texts, {row: num - 1 for row, num in most.items()}, samplers)
        guesses = proposal.drafts if proposal.num else {row: list[int]() for row in new}
        is_single = all(len(ids) == 1 for ids in new.values())
        began_s = time.perf_counter()
        if is_single and proposal.num == 0:
            logits = {row: of_row[None] for row, of_row in forwards.plain({row: new[row][0] for row in new}).items()}
        else:
            logits = forwards.verify({row: [*new[row], *guesses[row]] for row in new})
            logits = {row: of_row[len(new[row]) - 1 :] for row, of_row in logits.items()}

        def choose(at_place: dict[int, Tensor]) -> dict[int, int]:
            chosen = _guesses(samplers, at_place)
            for row, token in chosen.items():
                made[row].append(token)
            return chosen

        outcome = accept(guesses, logits, choose, lambda row: True)
        for row, num_unseen in outcome.unseen.items():
            forwards.take_back(row, num_unseen)
        if is_single:  # the first forward of a draft may have more to do
            self._note(proposal, outcome, made, time.perf_counter() - began_s)
        return made

    def _note(self, proposal: Proposal, outcome: Outcome, made: Mapping[int, list[int]], seconds: float) -> None:
        """Take the time and the outcome of a forward of one new token per row and the drafts for them."""
        paying, within, drafts = self._paying, self.within, proposal.drafts
        if paying is None or within is None:
            return
        within.draft_s += proposal.draft_s
        within.declined += proposal.is_declined
        if proposal.num:
            paying.add_verified(drafts, proposal.num, outcome, seconds, draft_s=proposal.draft_s)
            within.add_verification(outcome.accepted, {row: len(draft) for row, draft in drafts.items()}, seconds)
        else:
            paying.add_plain(drafts, {row: tokens[0] for row, tokens in made.items()}, seconds)
            within.add_plain(seconds)


class ModelDrafter(GeneratedDrafter):
    """A smaller model with the same tokens drafts what it would generate itself.

    Args:
        model: the smaller one.
        verifying: the one that verifies.
        on_layer: called after each layer of the prompts.
    """

    def __init__(
        self,
        model: Model,
        rows: Sequence[Row],
        first: Drafter | None = None,
        *,
        verifying: Model,
        on_layer: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(rows, first)
        self._model, self._verifying, self._on_layer = model, verifying, on_layer

    @staticmethod
    def check(model: Model, drafting: Model, *, lengths: Sequence[int], num_new: int) -> None:
        """Check that a model can draft for another.

        Args:
            lengths: tokens of each prompt.
            num_new: most new tokens.

        Raises:
            ValueError: it has other tokens, or not as many positions, or cannot compute these prompts together.
        """
        tokens = [len(each.tokenizer) if each.tokenizer is not None else each.vocab_size for each in (model, drafting)]
        if tokens[0] != tokens[1] or model.vocab_size != drafting.vocab_size:
            raise ValueError(
                f"model {drafting.name} has {drafting.vocab_size} tokens, and model {model.name}, for which it is to "
                f"draft, {model.vocab_size}; use one with the same tokenizer"
            )
        longest = max(lengths) + num_new
        if drafting.max_positions is not None and longest > drafting.max_positions:
            raise ValueError(
                f"a text of {longest} tokens exceeds the {drafting.max_positions} positions of model {drafting.name}, "
                "which is to draft; use another one, or a shorter prompt"
            )
        if len(set(lengths)) > 1 and drafting.uneven_limit is not None and longest > drafting.uneven_limit:
            raise ValueError(
                f"model {drafting.name} ({drafting.config.model_type}) counts positions from the start of the longest "
                "row, so it drafts for prompts of one length; use prompt.batch=1"
            )

    @property
    def tokens_to_begin(self) -> float:
        num_tokens = sum(len(row.prompt) + len(row.new_ids) for row in self._rows)
        return num_tokens * _num_weights(self._model) / _num_weights(self._verifying) + super().tokens_to_begin

    def _made(self, texts: Sequence[Sequence[int]]) -> RowForwards:
        model, longest = self._model, max(map(len, texts))
        pads = [longest - len(text) for text in texts]
        num_left = max(row.max_new_tokens - len(row.new_ids) for row in self._rows) + 1
        cache = model.empty_cache(longest + num_left, batch=len(texts))
        filled = [[*[0] * pad, *text] for pad, text in zip(pads, texts, strict=True)]
        ids_BS = sent(torch.tensor(filled), model.device)
        for start in range(0, longest, CHUNK_TOKENS):
            attention = CausalAttention(cache, start=start, pads=pads, on_layer=self._on_layer)
            ids_BC = ids_BS[:, start : start + CHUNK_TOKENS]
            model.forward(ids_BC, attention, start=start, pads=pads, length=longest)
        return RowForwards(model, cache, pads=pads, num_tokens=longest)


def _guesses(samplers: Mapping[int, Sampler], logits: Mapping[int, Tensor]) -> dict[int, int]:
    """The tokens that samplers choose from these logits (V), by row; any where a logit is no number."""
    chosen = next_tokens([samplers[row] for row in logits], torch.stack(list(logits.values())), raises=False)
    return {row: 0 if token is None else int(token) for row, token in zip(logits, chosen, strict=True)}


def _num_weights(model: Model) -> int:
    return sum(weight.numel() for weight in model.module.parameters())


def _num_common(ids: Sequence[int], text: Sequence[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = enumerate(zip(ids, text, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(text)))
