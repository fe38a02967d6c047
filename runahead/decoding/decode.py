"""The decoding loop, on the ranks with the KV cache: one token per row and step until all rows have ended."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from policies.row_values import row_values
from runahead.config import GenerationOptions
from runahead.decoding.forward import Forward
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.scored_tokens import ScoredToken
from runahead.decoding.stop_strings import StopStrings
from runahead.model.model import Model
from runahead.report import TokenLogprobs


class Row:
    """One row of the batch while it is generated.

    Attributes:
        prompt, new_ids: token ids.
        options: as given.
        logprobs: log-probabilities of each new token; empty if they were not asked for.
        device: where token ids go.
        finish_reason: "eos", "stop", "length", "cancelled", or None while it goes on.
    """

    def __init__(self, model: Model, prompt: list[int], options: GenerationOptions, seed: int) -> None:
        self.prompt, self.new_ids = prompt, list[int]()
        self.logprobs: list[TokenLogprobs] = []
        self.device = model.device
        self.finish_reason: str | None = None
        self.options = options
        self._eos = set() if options.ignore_eos else model.eos_token_ids
        schema = options.json_schema
        constraint = None if schema is None else model.json_schemas.constraint(schema)
        self.sampler = Sampler(options, seed, model.device, prompt=prompt, constraint=constraint)
        self._text = StopStrings(model.tokenizer, options.stop)

    def add(self, token: int) -> int:
        """Append a new token, and set `finish_reason` if the row ends with it. Returns the token."""
        self.new_ids.append(int(token))
        if isinstance(token, ScoredToken):
            self.logprobs.append(token.logprobs)
        if token in self._eos:
            self.finish_reason = "eos"
        elif self._text.add(token):
            self.finish_reason = "stop"
        elif len(self.new_ids) == self.options.max_new_tokens:
            self.finish_reason = "length"
        return token

    def cancel(self) -> None:
        """End the row, unless it has ended."""
        self.finish_reason = self.finish_reason or "cancelled"

    @property
    def max_new_tokens(self) -> int:
        return self.options.max_new_tokens

    @property
    def text(self) -> str:
        self._text.finish()
        return self._text.text


Choose = Callable[[Sequence[Sampler | None], Tensor | None], list[int | None]]
"""Samplers of the rows, and logits (B, V) -> the next token of every row, as `next_tokens`."""


@dataclass(kw_only=True)
class Decoded:
    """Rows that have ended, with the seconds of `time.perf_counter` at the first and the last token."""

    rows: list[Row]
    first_token_s: float
    last_token_s: float
    num_steps: int


def choose_alone(samplers: Sequence[Sampler | None], logits_BV: Tensor | None) -> list[int | None]:
    """`Choose` of a rank that decodes by itself."""
    assert logits_BV is not None, "another rank chooses"
    return next_tokens(samplers, logits_BV)


def decode(
    rows: list[Row],
    logits_BV: Tensor | None,
    forward: Forward,
    *,
    num_tokens: int,
    on_step: Callable[[list[int | None]], Iterable[int]],
    choose: Choose = choose_alone,
) -> Decoded:
    """Generate new tokens until every row has ended.

    Args:
        rows: one per prompt, without new tokens.
        logits_BV: logits of the prompts' last tokens; None on a rank that is told the tokens.
        forward: of one new token per row.
        num_tokens: length of the padded prompt.
        on_step: called with each step's tokens, None for rows that had ended before. Returns the rows to cancel.
        choose: chooses the next tokens.
    """
    step, first_token_s = 0, 0.0
    while True:
        samplers = [row.sampler if row.finish_reason is None else None for row in rows]
        chosen = choose(samplers, logits_BV)
        tokens = [None if token is None else row.add(token) for row, token in zip(rows, chosen, strict=True)]
        now = time.perf_counter()
        first_token_s = first_token_s or now
        for row in on_step(tokens):
            rows[row].cancel()
        step += 1
        if all(row.finish_reason is not None for row in rows):
            return Decoded(rows=rows, first_token_s=first_token_s, last_token_s=now, num_steps=step)
        ids_B1 = row_values([row.new_ids[-1] for row in rows], rows[0].device)[:, None]
        logits_BV = forward(ids_B1, num_tokens + step - 1)
