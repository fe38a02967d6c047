"""Tokens of texts and messages, made piece by piece by a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.prompt_cache.chat_template import NeverEnds, render

MARK = "\N{SNOWMAN}content\N{SNOWMAN}"
BEFORE = ((), ("system",), ("user", "assistant"), ("user",), ("system", "user", "assistant"), ("system", "user"))
"""Roles of earlier messages to try before another message, since templates refuse some orders."""


class ModelText:
    """Tokenizer and chat template of a model. Each piece is tokenized separately, independent of its neighbours.

    Args:
        tokenizer: tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: dict[tuple[str, bool], tuple[list[int], list[int]]] = {}

    def ids(self, text: str) -> list[int]:
        # verbose=False: the length is checked when positions are known.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    @property
    def front(self) -> list[int]:
        """Tokens that the tokenizer puts before every text, such as a beginning-of-text token."""
        with_special = list(self._tokenizer("a", verbose=False)["input_ids"])
        without = self.ids("a")
        for start in range(len(with_special) - len(without) + 1):
            if with_special[start : start + len(without)] == without:
                return with_special[:start]
        return []

    @property
    def placeholder(self) -> int:
        """Token that stands for an argument: <unk>, or a blank if the model has no such token."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return int(unknown) if unknown is not None else self.ids(" ")[0]

    def message(self, role: str, *, first: bool) -> tuple[list[int], list[int]]:
        """Tokens before and after the text of a message.

        Args:
            role: role of the message.
            first: whether it is the first message of the chat.

        Raises:
            ValueError: the model has no chat template, or one that does not take this message.
        """
        if (role, first) not in self._messages:
            before, after = self._markup(role, first)
            self._messages[role, first] = self.ids(before), self.ids(after)
        return self._messages[role, first]

    def answer(self) -> list[int]:
        """Tokens after a user's message that ask the model for its answer. Raises: ValueError."""
        for context in BEFORE:
            rendered = self._render([*context, "user"])
            asking = self._render([*context, "user"], add_generation_prompt=True)
            if rendered is not None and asking is not None and asking.startswith(rendered):
                return self.ids(asking[len(rendered) :])
        raise ValueError("the model's chat template cannot ask for an answer; write its markup as text")

    def _markup(self, role: str, first: bool) -> tuple[str, str]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("needs a chat template, and the model's tokenizer has none; write the markup as text")
        for context in BEFORE[:1] if first else BEFORE[1:]:
            before, whole = self._render(context), self._render([*context, role])
            if before is None or whole is None or not whole.startswith(before):
                continue
            parts = whole[len(before) :].split(MARK)
            if len(parts) == 2:
                return parts[0], parts[1]
        where = "as the first message" if first else "after other messages"
        raise ValueError(f"is not possible {where} in the model's chat template; write its markup as text")

    def _render(self, roles: Sequence[str], **options: Any) -> str | None:
        """Text of a chat with messages of these roles, or None if the template refuses it."""
        if not roles:
            return ""
        messages = [{"role": role, "content": MARK} for role in roles]
        try:
            return render(self._tokenizer, messages, **options)
        except NeverEnds:
            raise
        except ValueError:
            return None
