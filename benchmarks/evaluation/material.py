"""Inputs of tasks that are known before the model is loaded: a text, its tokens, and the model's limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Text:
    """A text and its name in messages."""

    name: str
    content: str


@dataclass(frozen=True)
class Material:
    """Inputs that all tasks share.

    Attributes:
        tokenizer: the model's tokenizer, or None.
        vocab_size: vocabulary size of the model.
        max_positions: the model's maximum number of positions, or None if its config has none.
        text: the user's text, if a task asks for one.
    """

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    text: Text | None

    def ids(self, text: str) -> list[int]:
        """Token ids of a text inside a longer sequence, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def text_ids(self) -> list[int]:
        """Token ids of the whole text."""
        assert self.text is not None
        return self.ids(self.text.content)

    @cached_property
    def sentences(self) -> list[str]:
        """The sentences of the text, each in one line."""
        assert self.text is not None
        return [" ".join(sentence.split()) for sentence in SENTENCE_ENDS.split(self.text.content.strip())]

    @cached_property
    def prefix(self) -> list[int]:
        """Special tokens that the tokenizer puts before every text; empty for most models."""
        with_special: list[int] = self.tokenizer("a", verbose=False)["input_ids"]
        without = self.ids("a")
        starts = [at for at in range(len(with_special)) if with_special[at : at + len(without)] == without]
        return with_special[: starts[0]] if starts else []

    def require_text(self, task: str, num_tokens: int, remedy: str) -> None:
        """Raises: ValueError: the text is shorter than a task needs."""
        assert self.text is not None
        if len(self.text_ids) < num_tokens:
            raise ValueError(
                f"{self.text.name} has {len(self.text_ids):,} tokens but {task} needs {num_tokens:,}; give a longer "
                f"text.file or {remedy}"
            )

    def require_positions(self, what: str, num_tokens: int, remedy: str = "lower it") -> None:
        """Raises: ValueError: `what` has more tokens than the model has positions."""
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise ValueError(
                f"{what} takes {num_tokens:,} positions, but the model has {self.max_positions:,}; {remedy}"
            )
