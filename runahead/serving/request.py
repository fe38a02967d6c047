"""A request as the scheduler knows it: rows of prompts with options, and who listens to its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies.reuse import GivenPrompt
from runahead.config import GenerationOptions
from runahead.report import PromptLogprobs
from runahead.reuse.forks import each_once
from runahead.serving.items import Handed


class Listener(Protocol):
    """Receives what happens to a request. The calls come from the scheduler's thread and must return at once."""

    def on_start(self) -> None:
        """Its prefill begins."""

    def on_tokens(self, tokens: Sequence[int | None]) -> None:
        """A new token of each row, None for rows that have ended."""

    def on_end(self) -> None:
        """All rows have ended."""

    def on_handed(self, handed: Handed) -> None:
        """Its prompt is handed over, or is not, before or after all rows have ended."""

    def on_failure(self, reason: str) -> None:
        """It will not be answered, or not further."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One request: rows that are generated at once.

    Attributes:
        prompts: of each row.
        options: options of each row.
        listener: who receives the tokens.
        client: whose request it is, for the limit of requests per client.
        salt: its prompts reuse, and are reused by, those of requests with the same salt alone.
        scores: number of most likely tokens that are given with the log-probabilities of the prompts' tokens; None
            asks for none. Such prompts are computed whole.
        handover: name of the file in which its one prompt is handed over to another engine; "": it is not.
        cancelled: nobody wants the answer any more; written by `Scheduler.cancel`.
        arrived_s: `time.monotonic` of its arrival.
        rows_left: rows that have not ended; written by the scheduler.
        predicted_ttft_s: seconds from its arrival to its first token, as predicted when it was queued.
        cached_tokens: of each row's prompt, tokens that were not computed for this request; written by the scheduler.
        found_tokens: of each row's prompt, tokens that were known to be stored when its prefill began; as above.
        prompt_scores: of each row's prompt, before its first token is told; as above.
        different: the different prompts.
        prompt_of: of each row, the number of its prompt among these.
    """

    prompts: Sequence[GivenPrompt]
    options: list[GenerationOptions]
    listener: Listener
    client: str = ""
    salt: str = ""
    scores: int | None = None
    handover: str = ""
    cancelled: bool = False
    arrived_s: float = field(default_factory=time.monotonic)
    rows_left: int = field(init=False)
    predicted_ttft_s: float = field(init=False, default=0.0)
    cached_tokens: list[int] = field(init=False)
    found_tokens: list[int] = field(init=False)
    prompt_scores: dict[int, PromptLogprobs] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        num_rows = self.rows_left = len(self.prompts)
        self.cached_tokens, self.found_tokens = [0] * num_rows, [0] * num_rows
        self.different, self.prompt_of = each_once(self.prompts)

    @property
    def longest(self) -> int:
        """Length of the longest row in tokens that are computed."""
        return max(map(len, self.prompts))

    @property
    def max_new_tokens(self) -> int:
        return max(each.max_new_tokens for each in self.options)
