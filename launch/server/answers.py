"""Answers in OpenAI's form: text of each row, its end, usage, and the objects that carry them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from runahead.config import GenerationOptions
from runahead.decoding.stop_strings import StopStrings

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's word for how a row ended."""


class RowText:
    """Text of one row, from its tokens; it ends where the rank that decodes ends it, for the same reason.

    Attributes:
        num_tokens: new tokens so far.
        finish_reason: "stop", "length", or None while the row goes on.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: set[int], options: GenerationOptions) -> None:
        self._text = StopStrings(tokenizer, options.stop)
        self._eos_ids = set() if options.ignore_eos else eos_ids
        self._max_new_tokens = options.max_new_tokens
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add(self, token: int) -> str:
        """Add a token, and return the text that is sure now."""
        if self.finish_reason is not None:
            return ""
        self.num_tokens += 1
        ended = None
        if token in self._eos_ids:
            ended = "eos"
        elif self._text.add(token):
            ended = "stop"
        elif self.num_tokens == self._max_new_tokens:
            ended = "length"
        if ended is not None:
            self._text.finish()
            self.finish_reason = FINISHED[ended]
        return self._text.take()

    @property
    def text(self) -> str:
        return self._text.text


class Form:
    """The objects of one answer: whole, or in chunks.

    Args:
        identity: of the request.
        model: the model's name in the API.
        is_chat: whether it is /v1/chat/completions.
    """

    def __init__(self, identity: str, model: str, *, is_chat: bool) -> None:
        prefix, kind = ("chatcmpl-", "chat.completion") if is_chat else ("cmpl-", "text_completion")
        self._is_chat = is_chat
        self._head = {"id": prefix + identity, "created": int(time.time()), "model": model}
        self._whole, self._chunk = kind, kind + ".chunk" if is_chat else kind

    def whole(self, rows: Sequence[RowText], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices = []
        for index, row in enumerate(rows):
            said: dict[str, Any] = {"text": row.text}
            if self._is_chat:
                said = {"message": {"role": "assistant", "content": row.text, "refusal": None}}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": row.finish_reason})
        return {**self._head, "object": self._whole, "choices": choices, "usage": usage}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The chunk before a row's text, which says who speaks; None if there is none."""
        return self._of(index, {"role": "assistant", "content": ""}) if self._is_chat else None

    def text(self, index: int, text: str) -> dict[str, Any]:
        """A chunk of a row's text."""
        return self._of(index, {"content": text} if self._is_chat else text)

    def end(self, index: int, reason: str | None) -> dict[str, Any]:
        """The last chunk of a row."""
        return self._of(index, {} if self._is_chat else "", reason)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after all rows, with the usage."""
        return {**self._head, "object": self._chunk, "choices": [], "usage": usage}

    def _of(self, index: int, said: dict[str, Any] | str, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta" if self._is_chat else "text": said, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": self._chunk, "choices": [choice]}


def usage_of(num_prompt_tokens: int, rows: Sequence[RowText]) -> dict[str, Any]:
    """Tokens of a request. A prompt counts once, however many answers it gets."""
    new = sum(row.num_tokens for row in rows)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": new,
        "total_tokens": num_prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
