"""The objects of Anthropic's Messages API: a message of blocks, whole or as typed events, and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launch.server.answer.calls import arguments_of
from launch.server.answer.form import Event, NamedForm
from launch.server.answer.logprobs import Scored
from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.row_text import RowText
from launch.server.answer.usage import Usage
from launch.server.errors import APIError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Type of an error by status; of others below 500 it is that of 400."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why an answer has ended, by OpenAI's word for it."""
DELTA = {
    Kind.content: ("text_delta", "text"),
    Kind.reasoning: ("thinking_delta", "thinking"),
    Kind.call: ("input_json_delta", "partial_json"),
}
"""Type of a delta, and the name of its text."""


class MessageForm(NamedForm):
    """The message that answers one request. A block is a run of pieces of one kind, or a call; the last may be open.

    Args:
        identity: of the request.
        model: the model's name in the API.
    """

    def __init__(self, identity: str, model: str) -> None:
        self._head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": model}
        self._num_blocks = 0
        self._open: tuple[Kind, int] | None = None

    def whole(self, rows: Sequence[RowText], usage: Usage) -> Event:
        [row] = rows
        blocks = [_block(piece, piece.text) for piece in row.pieces]
        return self._head | {"content": blocks} | _reason(row) | {"usage": _usage(usage)}

    def begin(self, index: int, usage: Usage) -> list[Event]:
        none_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return [{"type": "message_start", "message": self._head | none_yet}]

    def piece(self, index: int, piece: Piece, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        events = list[Event]()
        if self._open != (piece.kind, piece.number):
            events += self._close()
            self._open = piece.kind, piece.number
            events.append(self._event("content_block_start", content_block=_block(piece, "")))
        if piece.text:
            kind, name = DELTA[piece.kind]
            events.append(self._event("content_block_delta", delta={"type": kind, name: piece.text}))
        return events

    def end(self, index: int, row: RowText, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        told = {"type": "message_delta", "delta": _reason(row), "usage": _usage(usage)}
        return [*self._close(), told, {"type": "message_stop"}]

    def closed(self, usage: Usage) -> list[Event]:
        return []

    def failed(self, error: APIError) -> list[Event]:
        return [error_body(error)]

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the open block."""
        return {"type": kind, "index": self._num_blocks, **fields}

    def _close(self) -> list[Event]:
        """End the open block. One of reasoning is signed by nothing."""
        if self._open is None:
            return []
        (kind, _), self._open = self._open, None
        signed = [self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})]
        events = [*(signed if kind is Kind.reasoning else ()), self._event("content_block_stop")]
        self._num_blocks += 1
        return events


def error_body(error: APIError) -> dict[str, Any]:
    """The body of an error. Its message names the field, for which this API has no other place."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _block(piece: Piece, text: str) -> dict[str, Any]:
    """A block with this text. A call has its arguments as an object, which is empty until they are whole."""
    if piece.kind is Kind.content:
        return {"type": "text", "text": text}
    if piece.kind is Kind.reasoning:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": piece.identity, "name": piece.name, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    """Arguments as an object; an empty one of what is none, as where the answer was cut off."""
    return json.loads(arguments_of(text) or "{}")


def _reason(row: RowText) -> dict[str, Any]:
    """Why a row has ended."""
    if row.finish_reason == "stop" and row.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": row.stop}
    return {"stop_reason": REASONS[row.finish_reason or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens of the prompt that were stored are not among `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.new,
    }
