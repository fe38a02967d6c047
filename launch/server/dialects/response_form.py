"""The objects of OpenAI's Responses API: a response with its items, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.server.answer.form import Event, NamedForm
from launch.server.answer.logprobs import Scored
from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.row_text import RowText
from launch.server.answer.usage import Usage
from launch.server.errors import APIError

TOLD: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, with what they are where they were not given."""
PREFIX = {Kind.reasoning: "rs", Kind.content: "msg", Kind.call: "fc"}
EVENT = {
    Kind.reasoning: "response.reasoning_text",
    Kind.content: "response.output_text",
    Kind.call: "response.function_call_arguments",
}


class ResponseForm(NamedForm):
    """The response to one request. An item is a run of pieces of one kind, or a call; the last one may be open.

    Args:
        identity: of the request.
        model: the model's name in the API.
        body: of the request.
    """

    def __init__(self, identity: str, model: str, body: Mapping[str, Any]) -> None:
        self._identity, self._number = identity, 0
        told = {name: idle if body.get(name) is None else body[name] for name, idle in TOLD.items()}
        head = {"id": f"resp_{identity}", "object": "response", "created_at": int(time.time()), "model": model}
        self._head = head | told | {"previous_response_id": None, "store": False}
        self._items: list[dict[str, Any]] = []
        self._open: tuple[Kind, int] | None = None

    def whole(self, rows: Sequence[RowText], usage: Usage) -> Event:
        [row] = rows
        for piece in row.pieces:
            self._add(piece)
        self._close(row.finish_reason == "length")
        return self._ended(row, usage)

    def opened(self) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def begin(self, index: int, usage: Usage) -> list[Event]:
        return []

    def piece(self, index: int, piece: Piece, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        return self._add(piece)

    def end(self, index: int, row: RowText, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        events = self._close(row.finish_reason == "length")
        response = self._ended(row, usage)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def closed(self, usage: Usage) -> list[Event]:
        return []

    def failed(self, error: APIError) -> list[Event]:
        told = {"code": "server_error", "message": str(error)}
        return [self._event("response.failed", response=self._response("failed") | {"error": told})]

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        now = {"status": status, "output": [dict(item) for item in self._items], "error": None, "usage": None}
        return self._head | now | {"incomplete_details": None}

    def _ended(self, row: RowText, usage: Usage) -> dict[str, Any]:
        is_whole = row.finish_reason != "length"
        details = None if is_whole else {"reason": "max_output_tokens"}
        return self._response("completed" if is_whole else "incomplete") | {
            "incomplete_details": details,
            "completed_at": int(time.time()) if is_whole else None,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.new,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.total,
            },
        }

    # Items.

    def _add(self, piece: Piece) -> list[Event]:
        events, key = list[Event](), (piece.kind, piece.number)
        if self._open != key:
            events += [*self._close(), *self._begin(piece)]
            self._open = key
        item = self._items[-1]
        if piece.kind is Kind.call:
            item["arguments"] += piece.text
        else:
            [part] = item["content"]
            part["text"] += piece.text
        if piece.text:
            more: dict[str, Any] = {"logprobs": []} if piece.kind is Kind.content else {}
            events.append(self._event(f"{EVENT[piece.kind]}.delta", **self._place(), delta=piece.text, **more))
        return events

    def _begin(self, piece: Piece) -> list[Event]:
        identity = f"{PREFIX[piece.kind]}_{self._identity}_{len(self._items)}"
        item: dict[str, Any] = {"id": identity, "status": "in_progress"}
        part: dict[str, Any] | None = None
        if piece.kind is Kind.call:
            item |= {"type": "function_call", "call_id": piece.identity, "name": piece.name, "arguments": ""}
        elif piece.kind is Kind.reasoning:
            item |= {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        number = len(self._items)
        self._items.append(item)
        self._open = piece.kind, piece.number
        events = [self._event("response.output_item.added", output_index=number, item=dict(item))]
        if part is not None:
            item["content"] = [part]
            events.append(self._event("response.content_part.added", **self._place(), part=dict(part)))
        return events

    def _close(self, is_cut: bool = False) -> list[Event]:
        """End the open item; whether the answer was cut off in it."""
        if self._open is None:
            return []
        (kind, _), item = self._open, self._items[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        if kind is Kind.call:
            told = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event(f"{EVENT[kind]}.done", **self._place(), **told)]
        else:
            [part] = item["content"]
            more: dict[str, Any] = {"logprobs": []} if kind is Kind.content else {}
            events = [
                self._event(f"{EVENT[kind]}.done", **self._place(), text=part["text"], **more),
                self._event("response.content_part.done", **self._place(), part=dict(part)),
            ]
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))]

    def _place(self) -> dict[str, Any]:
        """Fields of an event about the last item."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] == "function_call" else place | {"content_index": 0}
