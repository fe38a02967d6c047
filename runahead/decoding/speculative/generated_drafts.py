"""Drafts that a cheaper forward generates: of a smaller model, or of the model itself over a part of its KV cache."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from policies.row_values import sent
from runahead.attention.op import nothing
from runahead.cache.attention import CausalAttention
from runahead.decoding.forward import fastest_form
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, RowId
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.speculative.acceptance import Acceptance
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts, Proposal
from runahead.model.model import Model

CHUNK_TOKENS = 512
"""Tokens of a prompt that a smaller model computes at a time."""


class GeneratedDrafter(Drafter):
    """Drafts by generating from forwards of its own, with the draws that the rows' samplers are about to make.

    Another drafter may draft for this one: then one of its forwards verifies several tokens, and those stay that it
    would have generated itself.

    All rows join before it begins.

    Args:
        first: drafts for this drafter; None lets it generate a token per forward.
        lead: the rank that decides what is drafted for this drafter, where several run it.
    """

    is_free = False

    def __init__(self, first: Drafter | None = None, lead: Lead = ALONE) -> None:
        self._first, self._lead = first, lead
        self._rows: dict[RowId, Row] = {}
        self._lanes: Lanes | None = None
        self._fed: dict[RowId, list[int]] = {}  # whose keys and values are stored
        self._paying: PayingDrafts | None = None

    @abstractmethod
    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        """The memory for drafts, with these tokens of each row stored."""

    def join(self, id: RowId, row: Row) -> None:
        assert self._lanes is None, "rows join before the drafter begins"
        self._rows[id] = row
        if self._first is not None:
            self._first.join(id, row)

    def leave(self, id: RowId) -> None:
        """Forget a row that has ended before drafts of it were made; later its memory stays."""
        if self._lanes is None:
            self._rows.pop(id, None)
            if self._first is not None:
                self._first.leave(id)

    @property
    def num_bytes(self) -> int:
        own = 0 if self._lanes is None else self._lanes.num_bytes
        return own + (0 if self._first is None else self._first.num_bytes)

    @property
    def tokens_to_begin(self) -> float:
        return 0.0 if self._first is None else self._first.tokens_to_begin

    def get_ready(self) -> bool:
        return self._first is None or self._first.get_ready()

    def begin(self) -> None:
        if not self._rows:
            return
        self._fed = {id: row.ids[:-1] for id, row in self._rows.items()}
        self._lanes = self._made(self._fed)
        self._lanes.part()
        if self._first is not None:
            always = any(row.options.speculate_always for row in self._rows.values())
            payoff = Payoff(warm_up=self._lanes.warm_up, always=always)
            name = "lookup" if self._first.is_free else "model"
            self._paying = PayingDrafts(self._first, payoff, name=name, lead=self._lead)
            self._paying.prepare()
            self.within = self._paying.report

    def draft(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> dict[RowId, list[int]]:
        drafts = {row: list[int]() for row in texts}
        asked = [row for row in texts if most[row] > 0]
        ahead = {row: samplers[row].ahead() for row in asked}
        new = {row: self._to_feed(row, texts[row]) for row in asked}
        while new:
            assert self._lanes is not None, "begin() comes first"
            self._lanes.keep(row for row in new if len(drafts[row]) < 2)  # no drafted token of these is stored
            going_on = {row: [*texts[row], *drafts[row]] for row in new}
            made = self._round(new, going_on, {row: most[row] - len(drafts[row]) for row in new}, ahead)
            for row, tokens in made.items():
                drafts[row] += tokens
            new = {row: tokens[-1:] for row, tokens in made.items() if len(drafts[row]) < most[row]}
        for row in asked:
            self._fed[row] = [*texts[row], *drafts[row][:-1]]
        return drafts

    def _to_feed(self, row: RowId, text: Sequence[int]) -> Sequence[int]:
        """The last tokens of a row's text, those that are not stored; wrong drafts are taken back."""
        assert self._lanes is not None, "begin() comes first"
        fed = self._fed[row]
        num_right = min(_num_common(fed, text), len(text) - 1)  # the last token is fed in any case
        self._lanes.take_back(row, len(fed) - num_right)
        return text[num_right:]

    def _round(
        self,
        new: Mapping[RowId, Sequence[int]],
        texts: Mapping[RowId, Sequence[int]],
        most: Mapping[RowId, int],
        samplers: Mapping[RowId, Sampler],
    ) -> dict[RowId, list[int]]:
        """One forward: the next tokens of each row, at least one.

        Args:
            new: last tokens of each text, those that are not stored.
            texts: of each row, with what is drafted so far.
            most: most tokens that may come.
            samplers: copies, which choose the tokens.
        """
        lanes, made = self._lanes, {row: list[int]() for row in new}
        assert lanes is not None, "begin() comes first"
        proposal = Proposal(drafts={row: [] for row in new})
        if self._paying is not None:
            proposal = self._paying.propose(texts, {row: num - 1 for row, num in most.items()}, samplers)
        guesses = proposal.to_verify
        is_single = all(len(ids) == 1 for ids in new.values())
        began_s = time.perf_counter()
        if is_single and proposal.num == 0:
            rows, logits_BV = lanes.plain({row: new[row][0] for row in new})
            logits = {row: logits_BV[at : at + 1] for at, row in enumerate(rows)}
        else:
            logits = lanes.verify({row: [*new[row], *guesses[row]] for row in new})
            logits = {row: of_row[len(new[row]) - 1 :] for row, of_row in logits.items()}
        acceptance = Acceptance(guesses)
        while acceptance.going_on:
            chosen = _guesses(samplers, {row: logits[row][acceptance.place] for row in acceptance.going_on})
            for row, token in chosen.items():
                made[row].append(token)
            acceptance.take(chosen)
        for row, num_unseen in acceptance.unseen.items():
            lanes.take_back(row, num_unseen)
        if is_single and self._paying is not None:  # the first forward of a draft may have more to do
            self._paying.note(proposal, acceptance, time.perf_counter() - began_s)
        return made


class ModelDrafter(GeneratedDrafter):
    """A smaller model with the same tokens drafts what it would generate itself.

    Args:
        model: the smaller one.
        verifying: the one that verifies.
        on_layer: called after each layer of the prompts.
        lead: as of `GeneratedDrafter`; on ranks that each have the whole of the smaller model one drafts alone.
    """

    def __init__(
        self,
        model: Model,
        first: Drafter | None = None,
        *,
        verifying: Model,
        on_layer: Callable[[], None] = nothing,
        lead: Lead = ALONE,
    ) -> None:
        self.runs_on_all = model.num_shards > 1
        super().__init__(first, lead if self.runs_on_all else ALONE)
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
        num_tokens = sum(len(row.ids) for row in self._rows.values())
        return num_tokens * _num_weights(self._model) / _num_weights(self._verifying) + super().tokens_to_begin

    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        model, longest = self._model, max(map(len, texts.values()))
        pads = [longest - len(text) for text in texts.values()]
        num_left = max(row.num_left for row in self._rows.values()) + 1
        cache = model.empty_cache(longest + num_left, batch=len(texts))
        filled = [[*[0] * pad, *text] for pad, text in zip(pads, texts.values(), strict=True)]
        ids_BS = sent(torch.tensor(filled), model.device)
        for start in range(0, longest, CHUNK_TOKENS):
            attention = CausalAttention(cache, start=start, pads=pads, on_layer=self._on_layer)
            ids_BC = ids_BS[:, start : start + CHUNK_TOKENS]
            model.forward(ids_BC, attention, start=start, pads=pads, length=longest)
        over = fastest_form(cache, model, pads=pads, num_tokens=longest, apart=True)
        return Lanes.holding(model, list(texts), over, pads=pads, num_tokens=longest)


def _guesses(samplers: Mapping[RowId, Sampler], logits: Mapping[RowId, Tensor]) -> dict[RowId, int]:
    """The tokens that samplers choose from these logits (V), by row; any where a logit is no number."""
    chosen = next_tokens([samplers[row] for row in logits], torch.stack(list(logits.values())))
    return {row: 0 if token is None else int(token) for row, token in zip(logits, chosen, strict=True)}


def _num_weights(model: Model) -> int:
    return sum(weight.numel() for weight in model.module.parameters())


def _num_common(ids: Sequence[int], text: Sequence[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = enumerate(zip(ids, text, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(text)))
