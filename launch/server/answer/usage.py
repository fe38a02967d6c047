"""Tokens of a request: of its prompts, of these the stored ones, and of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.server.answer.row_text import RowText


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Numbers of tokens.

    Attributes:
        prompt: of all prompts, each once, however many answers it gets.
        cached: of these, those whose keys and values were stored before the request.
        new: of all answers so far.
        reasoning: of these, those of reasoning.
    """

    prompt: int
    cached: int = 0
    new: int = 0
    reasoning: int = 0

    @classmethod
    def of(cls, num_prompt_tokens: int, rows: Sequence[RowText], cached_tokens: int = 0) -> Usage:
        """Usage of a request with these rows."""
        new, reasoning = (sum(getattr(row, name) for row in rows) for name in ("num_tokens", "num_reasoning_tokens"))
        return cls(prompt=num_prompt_tokens, cached=cached_tokens, new=new, reasoning=reasoning)

    @property
    def total(self) -> int:
        return self.prompt + self.new
