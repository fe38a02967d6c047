"""What tasks are made of and is known before the model is loaded: a text, its tokens, and the model's limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and what messages are to call it."""

    name: str
    content: str


@dataclass(frozen=True)
class Material:
    """For all tasks.

    Attributes:
        tokenizer: the model's, if it has one.
        vocab_size: of the model.
        max_positions: tokens that the model was made for, if it says so.
        text: the user's text, if a task asks for one.
    """

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    text: Text | None

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that stands in the middle of others."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def text_ids(self) -> list[int]:
        """Of the whole text."""
        assert self.text is not None
        return self.ids(self.text.content)

    @cached_property
    def prefix(self) -> list[int]:
        """Special tokens that begin every text, for models that want one."""
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
        """Raises: ValueError: `what`, of so many tokens, is more than the model was made for."""
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise ValueError(
                f"{what} takes {num_tokens:,} positions, but the model has {self.max_positions:,}; {remedy}"
            )
