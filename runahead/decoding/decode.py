"""The decoding loop, on the rank with the whole KV cache: one token per row and step until all rows have ended."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Phase, Policy
from runahead.attention.base import LayerAttention
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.kept import NEW_ROOM, KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.config import GenerationOptions
from runahead.decoding.sampling import Sampler
from runahead.decoding.stop_strings import StopStrings
from runahead.model.model import Model
from runahead.thinning.attention import KeptAttention
from runahead.thinning.steps import PolicySteps


class Row:
    """One row of the batch while it is generated.

    Attributes:
        prompt, new_ids: token ids.
        finish_reason: "eos", "stop", "length", or None while it goes on.
    """

    def __init__(self, model: Model, prompt: list[int], options: GenerationOptions, seed: int) -> None:
        self.prompt, self.new_ids = prompt, list[int]()
        self.finish_reason: str | None = None
        self._options = options
        self._eos = set() if options.ignore_eos else model.eos_token_ids
        self._sampler = Sampler(options, seed, model.device)
        self._text = StopStrings(model.tokenizer, options.stop)

    def step(self, logits_V: Tensor) -> int:
        """Choose the next token from its logits, and set `finish_reason` if the row ends with it."""
        token = self._sampler.next_token(self.prompt + self.new_ids, logits_V)
        self.new_ids.append(token)
        if token in self._eos:
            self.finish_reason = "eos"
        elif self._text.add(token):
            self.finish_reason = "stop"
        elif len(self.new_ids) == self._options.max_new_tokens:
            self.finish_reason = "length"
        return token

    @property
    def text(self) -> str:
        self._text.finish()
        return self._text.text


@dataclass(kw_only=True)
class Decoded:
    """Rows that have ended, with the seconds of `time.perf_counter` at the first and the last token."""

    rows: list[Row]
    first_token_s: float
    last_token_s: float
    num_steps: int


def attention_over(
    cache: KVStore, policies: Sequence[Policy], *, pads: list[int], prompt_tokens: int, num_layers: int
) -> Callable[[int], LayerAttention]:
    """Choose the attention of single new tokens to a prompt's KV cache.

    Args:
        policies: those that decide after each token, over a cache that can drop tokens.

    Returns:
        A function from the index of the new token in the padded batch to the attention of its forward.
    """
    if not policies:
        return lambda start: CausalAttention(cache, start=start, pads=pads, phase=Phase.decode)
    assert isinstance(cache, KeptCache), type(cache)

    def over_what_is_kept(start: int) -> KeptAttention:
        tokens = NewTokens(start, pads, Phase.decode)
        steps = PolicySteps(policies, tokens, prompt_tokens=prompt_tokens, num_layers=num_layers, room=NEW_ROOM)
        return KeptAttention(cache, steps)

    return over_what_is_kept


def decode(
    model: Model,
    rows: list[Row],
    logits_BV: Tensor,
    attention_at: Callable[[int], LayerAttention],
    *,
    num_tokens: int,
    pads: list[int],
    on_step: Callable[[list[int | None]], None],
) -> Decoded:
    """Generate new tokens until every row has ended.

    Args:
        rows: one per prompt, without new tokens.
        logits_BV: logits of the prompts' last tokens.
        attention_at: index of a new token in the padded batch -> attention of its forward.
        num_tokens: length of the padded prompt.
        pads: left padding per row.
        on_step: called with each step's tokens, None for rows that had ended before.
    """
    step, first_token_s = 0, 0.0
    while True:
        tokens = [row.step(logits_BV[i]) if row.finish_reason is None else None for i, row in enumerate(rows)]
        now = time.perf_counter()
        first_token_s = first_token_s or now
        on_step(tokens)
        step += 1
        if all(row.finish_reason is not None for row in rows):
            return Decoded(rows=rows, first_token_s=first_token_s, last_token_s=now, num_steps=step)
        ids_B1 = torch.tensor([[row.new_ids[-1]] for row in rows], device=model.device)
        start = num_tokens + step - 1
        logits_BV = model.forward(ids_B1, attention_at(start), start=start, pads=pads)
