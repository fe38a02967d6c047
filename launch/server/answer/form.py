"""OpenAI's objects that carry an answer, whole or in chunks, and its usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from launch.server.answer.echo import with_prompt
from launch.server.answer.logprobs import Scored, TokenTexts, chat_logprobs, text_logprobs
from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.row_text import RowText
from launch.server.request.fields import CompletionRequest
from runahead.serving.request import Request


class Form:
    """The objects of one answer: whole, or in chunks.

    Args:
        identity: of the request.
        model: the model's name in the API.
        is_chat: whether it is /v1/chat/completions.
        texts: of single tokens, for log-probabilities.
    """

    def __init__(self, identity: str, model: str, *, is_chat: bool, texts: TokenTexts) -> None:
        prefix, kind = ("chatcmpl-", "chat.completion") if is_chat else ("cmpl-", "text_completion")
        self._is_chat, self._texts = is_chat, texts
        self._head = {"id": prefix + identity, "created": int(time.time()), "model": model}
        self._whole, self._chunk = kind, kind + ".chunk" if is_chat else kind

    def whole(self, rows: Sequence[RowText], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices = []
        for index, row in enumerate(rows):
            said: dict[str, Any] = {"message": _message(row)} if self._is_chat else {"text": row.content}
            logprobs = self._logprobs(row.take_scored())
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": row.finish_reason})
        return {**self._head, "object": self._whole, "choices": choices, "usage": usage}

    def with_prompts(
        self, answer: dict[str, Any], read: CompletionRequest, prompts: Sequence[Sequence[int]], queued: Request
    ) -> dict[str, Any]:
        """A whole answer, with each prompt before its answers.

        Args:
            prompts: token ids of each row.
        """
        choices = [
            with_prompt(
                choice,
                read.prompts[index // len(read.options)],
                prompts[index],
                queued.prompt_scores.get(index),
                self._texts,
                is_answered=read.is_answered,
            )
            for index, choice in enumerate(answer["choices"])
        ]
        return answer | {"choices": choices}

    def progress(self, *, total: int, cache: int, processed: int, time_ms: int) -> dict[str, Any]:
        """A chunk before all text with the progress of the prefill, as llama.cpp's server has it.

        Args:
            total: tokens of the prompts.
            cache: of these, those that need not be computed, as their keys and values are stored.
            processed: those that are computed or stored.
            time_ms: since the prefill began.
        """
        chunk = self._of(0, {"role": "assistant", "content": None} if self._is_chat else "")
        progress = {"total": total, "cache": cache, "processed": processed, "time_ms": time_ms}
        return chunk | {"prompt_progress": progress}

    def begin(self, index: int) -> dict[str, Any] | None:
        """The chunk before a row's text, which says who speaks; None if there is none."""
        return self._of(index, {"role": "assistant", "content": ""}) if self._is_chat else None

    def piece(self, index: int, piece: Piece, scored: Sequence[Scored]) -> dict[str, Any]:
        """A chunk of a row's answer, with the log-probabilities of the tokens since the chunk before."""
        return self._of(index, _delta(piece) if self._is_chat else piece.text, scored=scored)

    def end(self, index: int, reason: str | None, scored: Sequence[Scored]) -> dict[str, Any]:
        """The last chunk of a row, with the log-probabilities of tokens that have no text."""
        return self._of(index, {} if self._is_chat else "", reason, scored)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after all rows, with the usage."""
        return {**self._head, "object": self._chunk, "choices": [], "usage": usage}

    def _of(
        self, index: int, said: dict[str, Any] | str, reason: str | None = None, scored: Sequence[Scored] = ()
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self._is_chat else "text": said,
            "logprobs": self._logprobs(scored),
            "finish_reason": reason,
        }
        return {**self._head, "object": self._chunk, "choices": [choice]}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not scored:
            return None
        return (chat_logprobs if self._is_chat else text_logprobs)(scored, self._texts)


def _message(row: RowText) -> dict[str, Any]:
    """The message of a chat's answer."""
    pieces = row.pieces
    reasoning = "".join(piece.text for piece in pieces if piece.kind is Kind.reasoning)
    calls = [_call(piece) for piece in pieces if piece.kind is Kind.call]
    message: dict[str, Any] = {"role": "assistant", "content": row.content, "refusal": None}
    if calls:
        message |= {"content": row.content or None, "tool_calls": calls}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def _delta(piece: Piece) -> dict[str, Any]:
    """What a chunk of a chat's answer adds to it."""
    if piece.kind is Kind.content:
        return {"content": piece.text}
    if piece.kind is Kind.reasoning:
        return {"reasoning_content": piece.text}
    call = _call(piece) if piece.name is not None else {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.number} | call]}


def _call(piece: Piece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.text}
    return {"id": piece.identity, "type": "function", "function": function}


def usage_of(num_prompt_tokens: int, rows: Sequence[RowText], cached_tokens: int = 0) -> dict[str, Any]:
    """Tokens of a request.

    Args:
        num_prompt_tokens: of all prompts, each once, however many answers it gets.
        cached_tokens: of these, those whose keys and values were stored before the request.
    """
    new = sum(row.num_tokens for row in rows)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": new,
        "total_tokens": num_prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
