"""Prefill for other engines: a prompt in, and the name of the file with its keys and values out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.server.answer.form import Event
from launch.server.answer.listener import RequestListener
from launch.server.answer.logprobs import TokenTexts
from launch.server.dialects.openai import Chats, CompletionForm
from launch.server.dialects.translating import HANDED_OVER, IDLE
from launch.server.errors import wrong
from launch.server.request.fields import ChatRequest, CompletionRequest, HandoverWay, read_chat, read_completion
from runahead.config import GenerationOptions
from runahead.serving.request import Request

PATH = "/v1/prefill"

ABSENT = (
    *("stream", "stream_options", "return_progress", "echo", "logprobs", "top_logprobs", "prompt_cache"),
    *("tools", "tool_choice", "response_format", *HANDED_OVER),
    *("max_tokens", "max_completion_tokens", "min_tokens", "n"),
)
"""Fields of completions and chats that have no meaning here."""

OF_ONE = ("max_tokens", "max_completion_tokens", "n")
"""Fields of which 1 asks for nothing else."""


class Prefills(Chats):
    """POST /v1/prefill: a completion, or a chat, of one token, whose prompt is handed over."""

    def translated(self, body: dict[str, Any]) -> dict[str, Any]:
        for name in ABSENT:
            is_one = name in OF_ONE and body.get(name) == 1
            if body.get(name) not in IDLE and not is_one:
                raise wrong(name, f"is no field of {PATH}; leave it out", code="unknown_parameter")
        self._gives_token = body.get("first_token")
        if not isinstance(self._gives_token, bool | None):
            raise wrong("first_token", "must be true or false")
        left_out = {*ABSENT, "first_token"}
        return {name: value for name, value in body.items() if name not in left_out} | {"max_tokens": 1}

    def read(self, fields: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest | CompletionRequest:
        read = (read_chat if "messages" in fields else read_completion)(fields, defaults)
        if isinstance(read, CompletionRequest) and len(read.prompts) > 1:
            raise wrong("prompt", "must be one text or one list of token ids")
        return replace(read, handover=HandoverWay.prefill, gives_token=bool(self._gives_token))

    def form(
        self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts
    ) -> CompletionForm:
        return PrefillForm(identity, model, read, texts)


class PrefillForm(CompletionForm):
    """The object that says where a prompt is."""

    def __init__(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> None:
        super().__init__(identity, model, read, texts)
        self._head["id"] = f"prefill-{identity}"

    def finished(
        self, answer: Event, prompts: Sequence[Sequence[int]], queued: Request, listener: RequestListener
    ) -> Event:
        handed, first_s = listener.handed, listener.first_token_s
        assert handed is not None and listener.handed_s is not None
        return {
            "id": answer["id"],
            "object": "prefill",
            "created": int(time.time()),
            "model": answer["model"],
            "folder": handed.folder,
            "file": handed.file,
            "path": f"{handed.folder}/{handed.file}",
            "host": handed.host,
            "num_tokens": len(prompts[0]),
            "num_bytes": handed.num_bytes,
            "is_new": handed.is_new,
            "ttft_s": None if first_s is None else round(first_s - listener.arrived_s, 6),
            "ready_s": round(listener.handed_s - listener.arrived_s, 6),
            "first_token": listener.first_token if self._read.gives_token else None,
            "usage": answer["usage"],
        }
