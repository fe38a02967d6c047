"""OpenAI's chats and completions, which all requests become, and their answers, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.server.answer.echo import with_prompt
from launch.server.answer.form import Event, Form
from launch.server.answer.listener import RequestListener
from launch.server.answer.logprobs import Scored, TokenTexts, chat_logprobs, text_logprobs
from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.row_text import RowText
from launch.server.answer.usage import Usage
from launch.server.dialects.base import Dialect
from launch.server.errors import APIError
from launch.server.request.fields import ChatRequest, CompletionRequest, HandoverWay, read_completion
from runahead.config import GenerationOptions
from runahead.serving.request import Request


class Chats(Dialect):
    """/v1/chat/completions."""

    def form(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> Form:
        return CompletionForm(identity, model, read, texts)


class Completions(Chats):
    """/v1/completions."""

    def read(self, fields: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest | CompletionRequest:
        return read_completion(fields, defaults)


class CompletionForm(Form):
    """The objects of the answer of a chat or a completion. A stream ends with `[DONE]`.

    Args:
        identity: of the request.
        model: the model's name in the API.
        read: the request.
        texts: of single tokens, for log-probabilities.
    """

    ending = b"data: [DONE]\n\n"

    def __init__(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> None:
        self._is_chat = is_chat = isinstance(read, ChatRequest)
        prefix, kind = ("chatcmpl-", "chat.completion") if is_chat else ("cmpl-", "text_completion")
        self._read, self._texts = read, texts
        self._head = {"id": prefix + identity, "created": int(time.time()), "model": model}
        self._whole, self._chunk = kind, kind + ".chunk" if is_chat else kind

    def whole(self, rows: Sequence[RowText], usage: Usage) -> Event:
        choices = []
        for index, row in enumerate(rows):
            said: dict[str, Any] = {"message": _message(row)} if self._is_chat else {"text": row.content}
            logprobs = self._logprobs(row.take_scored())
            choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": row.finish_reason})
        return {**self._head, "object": self._whole, "choices": choices, "usage": usage_of(usage)}

    def finished(
        self, answer: Event, prompts: Sequence[Sequence[int]], queued: Request, listener: RequestListener
    ) -> Event:
        read, handed = self._read, listener.handed
        if read.handover is HandoverWay.params and handed is not None:
            params = {
                "do_remote_prefill": not handed.error,
                "do_remote_decode": False,
                "runahead_file": None if handed.error else handed.file,
                "runahead_folder": handed.folder,
                "runahead_host": handed.host,
                "runahead_tokens": len(prompts[0]),
            }
            return answer | {"kv_transfer_params": params}
        if not isinstance(read, CompletionRequest) or not read.echo:
            return answer
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

    def progress(self, *, total: int, cache: int, processed: int, time_ms: int) -> list[Event]:
        """A chunk without text, as llama.cpp's server has it."""
        chunk = self._of(0, {"role": "assistant", "content": None} if self._is_chat else "")
        progress = {"total": total, "cache": cache, "processed": processed, "time_ms": time_ms}
        return [chunk | {"prompt_progress": progress}]

    def begin(self, index: int, usage: Usage) -> list[Event]:
        """The chunk that says who speaks, of a chat."""
        said = {"role": "assistant", "content": ""}
        return [self._with_usage(self._of(index, said), usage)] if self._is_chat else []

    def piece(self, index: int, piece: Piece, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        said = _delta(piece) if self._is_chat else piece.text
        return [self._with_usage(self._of(index, said, scored=scored), usage)]

    def end(self, index: int, row: RowText, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        chunk = self._of(index, {} if self._is_chat else "", row.finish_reason, scored)
        return [self._with_usage(chunk, usage)]

    def closed(self, usage: Usage) -> list[Event]:
        """The chunk with the usage alone, if it was asked for."""
        if not self._read.include_usage:
            return []
        return [{**self._head, "object": self._chunk, "choices": [], "usage": usage_of(usage)}]

    def failed(self, error: APIError) -> list[Event]:
        return [error.body]

    def _with_usage(self, chunk: Event, usage: Usage) -> Event:
        return chunk | {"usage": usage_of(usage)} if self._read.continuous_usage else chunk

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
    """The `delta` of a chunk of a chat's answer."""
    if piece.kind is Kind.content:
        return {"content": piece.text}
    if piece.kind is Kind.reasoning:
        return {"reasoning_content": piece.text}
    call = _call(piece) if piece.name is not None else {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.number} | call]}


def _call(piece: Piece) -> dict[str, Any]:
    function = {"name": piece.name, "arguments": piece.text}
    return {"id": piece.identity, "type": "function", "function": function}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens in the words of this API."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.new,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
