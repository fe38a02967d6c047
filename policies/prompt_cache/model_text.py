"""Texts and messages as a model's tokens: its tokenizer and its chat template, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.prompt_cache.chat_template import NeverEnds, render

MARK = "\N{SNOWMAN}content\N{SNOWMAN}"
BEFORE = ((), ("system",), ("user", "assistant"), ("user",), ("system", "user", "assistant"), ("system", "user"))
"""Roles of messages that may stand in front of another one; templates refuse some orders."""


class ModelText:
    """A piece of text is tokenized by itself, so its tokens do not depend on what is beside it.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: dict[tuple[str, bool], tuple[list[int], list[int]]] = {}

    def ids(self, text: str) -> list[int]:
        # verbose=False: how long a text may be is checked where its position is known.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    @property
    def front(self) -> list[int]:
        """What the tokenizer puts in front of every text, such as a token for its beginning."""
        with_special = list(self._tokenizer("a", verbose=False)["input_ids"])
        without = self.ids("a")
        for start in range(len(with_special) - len(without) + 1):
            if with_special[start : start + len(without)] == without:
                return with_special[:start]
        return []

    @property
    def placeholder(self) -> int:
        """The token that keeps the place of an argument: <unk>, or a blank if the model has no such token."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return int(unknown) if unknown is not None else self.ids(" ")[0]

    def message(self, role: str, *, first: bool) -> tuple[list[int], list[int]]:
        """Tokens in front of a message's text and behind it, where it is the chat's first message or a later one.

        Raises:
            ValueError: the model has no chat template, or it does not make messages one after the other.
        """
        if (role, first) not in self._messages:
            before, after = self._markup(role, first)
            self._messages[role, first] = self.ids(before), self.ids(after)
        return self._messages[role, first]

    def answer(self) -> list[int]:
        """Tokens that ask the model for its answer, behind a user's message. Raises: ValueError."""
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
        where = "as the first message" if first else "behind other messages"
        raise ValueError(f"is not possible {where} in the model's chat template; write its markup as text")

    def _render(self, roles: Sequence[str], **options: Any) -> str | None:
        """A chat of such messages, or None if the template does not take it."""
        if not roles:
            return ""
        messages = [{"role": role, "content": MARK} for role in roles]
        try:
            return render(self._tokenizer, messages, **options)
        except NeverEnds:
            raise
        except ValueError:
            return None
