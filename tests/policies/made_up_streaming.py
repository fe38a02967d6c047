"""Heads that retrieve and heads that stream, without a file that says which."""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import ModelFacts
from policies.streaming_heads import StreamingHeads


@dataclass(kw_only=True)
class MadeUpStreaming(StreamingHeads):
    """The first KV head of each layer retrieves.

    Attributes:
        compensate: as of `RazorAttention`.
    """

    sinks: int = 2
    recent: int = 6
    compensate: bool = False

    @property
    def compensates(self) -> bool:
        return self.compensate

    def require(self, model: ModelFacts) -> None:
        self._retrieving = self.found_in("", model)

    def found_in(self, heads: str, model: ModelFacts) -> list[list[bool]]:
        return [[head == 0 for head in range(num)] for num, _ in model.heads]

    def first_and_last(self, prompt_tokens: int) -> tuple[int, int]:
        return self.sinks, self.recent
