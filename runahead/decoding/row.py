"""`Row`: a prompt and the text after it, while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runahead.config import GenerationOptions
from runahead.decoding.sampling import Sampler
from runahead.decoding.scored_tokens import ScoredToken
from runahead.decoding.stop_strings import EndingText
from runahead.model.model import Model
from runahead.report import TokenLogprobs

RowId = tuple[int, int]
"""Number of a prompt batch, and of the row in it."""


def batch_ids(num_rows: int) -> list[RowId]:
    """Names of the rows of a batch that is decoded alone."""
    return [(0, row) for row in range(num_rows)]


@dataclass(frozen=True)
class NewToken:
    """A row's next token, None if the row ended with NOT_NUMBERS, and its `Row.finish_reason`."""

    row: RowId
    token: int | None
    ended: str | None


class Row:
    """One row of the batch while it is generated.

    Attributes:
        prompt, new_ids: token ids.
        ids: both together.
        options: as given.
        logprobs: log-probabilities of each new token; empty if they were not asked for.
        finish_reason: "eos", "stop", "length", "cancelled", the error NOT_NUMBERS, or None while it goes on.
    """

    def __init__(self, model: Model, prompt: list[int], options: GenerationOptions, seed: int) -> None:
        self.prompt, self.new_ids, self.ids = prompt, list[int](), list(prompt)
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        assert not options.of_model, "options are resolved before rows are made"
        self.options = options
        self._text = EndingText(model.tokenizer, model.eos_token_ids, options)
        constraint = None if options.guide is None else model.grammars.constraint(options.guide)
        ends = sorted(self._text.ends)
        self.sampler = Sampler(options, seed, model.device, prompt=prompt, constraint=constraint, ends=ends)

    def add(self, token: int) -> None:
        """Append a new token, and set `finish_reason` if the row ends with it."""
        self.new_ids.append(int(token))
        self.ids.append(int(token))
        if isinstance(token, ScoredToken):
            self.logprobs.append(token.logprobs)
        self.finish_reason = self._text.add(token)

    def end(self, reason: str) -> None:
        """End the row, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    @property
    def num_left(self) -> int:
        """Most new tokens that may still come."""
        return self.options.max_new_tokens - len(self.new_ids)

    @property
    def text(self) -> str:
        self._text.finish()
        return self._text.text


def row_options(
    options: GenerationOptions | Sequence[GenerationOptions], num_rows: int, first_index: int
) -> list[tuple[GenerationOptions, int]]:
    """Options and seed of every row. Raises: ValueError: there are not as many options as rows."""
    if isinstance(options, GenerationOptions):
        return [(options, options.seed + first_index + index) for index in range(num_rows)]
    if len(options) != num_rows:
        raise ValueError(f"{num_rows} prompts were given with {len(options)} generation options; give one for each")
    return [(each, each.seed) for each in options]
