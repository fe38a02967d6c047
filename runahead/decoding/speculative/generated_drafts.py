"""Drafts that a cheaper forward generates: of a smaller model, or of the model itself over a part of its KV cache."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runahead.attention.causal import nothing
from runahead.cache.attention import CausalAttention
from runahead.decoding.decode import Row
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.verification import RowForwards
from runahead.model.model import Model

CHUNK_TOKENS = 512
"""Tokens of a prompt that a smaller model computes at a time."""


class GeneratedDrafter(Drafter):
    """Drafts by generating from forwards of its own, with the draws that the rows' samplers are about to make.

    Args:
        rows: of the batch, before their first token.
    """

    is_free = False

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._forwards: RowForwards | None = None
        self._fed: list[list[int]] = [list(row.prompt) for row in rows]  # whose keys and values are stored

    @abstractmethod
    def _made(self) -> RowForwards:
        """The forwards, with the prompts stored."""

    @property
    def num_bytes(self) -> int:
        return 0 if self._forwards is None else self._forwards.cache.num_bytes

    def begin(self) -> None:
        self._forwards = self._made()

    def draft(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, list[int]]:
        assert self._forwards is not None, "begin() comes first"
        forwards, drafts = self._forwards, {row: list[int]() for row in texts}
        asked = [row for row in texts if most[row] > 0]
        if not asked:
            return drafts
        samplers, rest = {row: self._rows[row].sampler.ahead() for row in asked}, dict[int, Sequence[int]]()
        for row in asked:
            text, fed = texts[row], self._fed[row]
            num_right = min(_num_common(fed, text), len(text) - 1)  # the last token is fed in any case
            forwards.take_back(row, len(fed) - num_right)
            rest[row] = text[num_right:]
        logits = {row: logits_CV[-1] for row, logits_CV in forwards.verify(rest).items()}
        while logits:
            for row, token in _guesses(samplers, logits).items():
                drafts[row].append(token)
            going_on = {row: drafts[row][-1] for row in logits if len(drafts[row]) < most[row]}
            logits = forwards.plain(going_on) if going_on else {}
        for row in asked:
            self._fed[row] = [*texts[row], *drafts[row][:-1]]
        return drafts


class ModelDrafter(GeneratedDrafter):
    """A smaller model with the same tokens drafts what it would generate itself.

    Args:
        model: the smaller one.
        on_layer: called after each layer of the prompts.
    """

    def __init__(self, model: Model, rows: Sequence[Row], *, on_layer: Callable[[], None] = nothing) -> None:
        super().__init__(rows)
        self._model, self._on_layer = model, on_layer

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

    def _made(self) -> RowForwards:
        model, prompts = self._model, [row.prompt for row in self._rows]
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        num_new = max(row.max_new_tokens for row in self._rows)
        cache = model.empty_cache(longest + num_new, batch=len(prompts))
        filled = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
        ids_BS = torch.tensor(filled, device=model.device)
        for start in range(0, longest, CHUNK_TOKENS):
            attention = CausalAttention(cache, start=start, pads=pads, on_layer=self._on_layer)
            ids_BC = ids_BS[:, start : start + CHUNK_TOKENS]
            model.forward(ids_BC, attention, start=start, pads=pads, length=longest)
        return RowForwards(model, cache, pads=pads, num_tokens=longest)


def _guesses(samplers: Mapping[int, Sampler], logits: Mapping[int, Tensor]) -> dict[int, int]:
    """The tokens that samplers choose from these logits (V), by row; any where a logit is no number."""
    chosen = next_tokens([samplers[row] for row in logits], torch.stack(list(logits.values())), raises=False)
    return {row: 0 if token is None else int(token) for row, token in zip(logits, chosen, strict=True)}


def _num_common(ids: Sequence[int], text: Sequence[int]) -> int:
    """Number of first tokens that are the same."""
    pairs = enumerate(zip(ids, text, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(text)))
