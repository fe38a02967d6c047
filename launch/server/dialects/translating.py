"""Translation of requests to chats: objects of a body, and the chat's messages with the places they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.server.dialects.base import Dialect
from launch.server.errors import APIError, shown, wrong
from launch.server.request.messages import MAX_MESSAGES
from launch.server.request.reader import unknown, unsupported

IDLE: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing."""

HANDED_OVER = ("kv_transfer_params", "cache_hit_threshold")
"""Fields that ask for a prompt to be handed over, by answers of forms that tell where."""


class Translated(Dialect):
    """A dialect whose requests become chats. Fields that it does not know are the chat's, as are vLLM's.

    Attributes:
        path: of its endpoint.
        own: names of its fields, by those of the chat's that stand for the same.
        absent: fields of a chat that its requests cannot have.
        idle: its fields that change nothing here.
        refused: its fields that would change an answer and cannot be had, with what to do instead.
    """

    path: str
    own: Mapping[str, str]
    absent: tuple[str, ...] = (
        *("n", "logprobs", "top_logprobs", "prompt_cache", "return_progress", "stream_options"),
        *HANDED_OVER,
    )
    idle: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self.names = dict(self.own)
        self.messages: list[dict[str, Any]] = []

    def rest(self, body: Mapping[str, Any], taken: tuple[str, ...]) -> dict[str, Any]:
        """The fields of a body that are the chat's, too. Raises: APIError: one that is not to be had here."""
        for name, remedy in self.refused.items():
            if body.get(name) not in IDLE:
                raise wrong(name, f"is not supported by this server; {remedy}", code="unsupported_parameter")
        for name, own in self.own.items():
            if name != own and name not in taken and "." not in name and body.get(name) is not None:
                raise wrong(name, f"is no field of {self.path}; use '{own}'", code="unknown_parameter")
        for name in self.absent:
            if body.get(name) not in IDLE and not (name == "n" and body[name] == 1):
                raise wrong(name, f"is no field of {self.path}; leave it out", code="unknown_parameter")
        left_out = {*taken, *self.idle, *self.refused, *self.absent, *self.own}
        return {name: value for name, value in body.items() if name not in left_out}

    def counted(self, num_tokens: int) -> dict[str, Any]:
        """The answer to a request for the number of a prompt's tokens."""
        return {"input_tokens": num_tokens}

    def say(self, place: str, role: str, content: Any, **more: Any) -> dict[str, Any]:
        """Add a message of the chat, which comes from this place of the body."""
        self.names[f"messages[{len(self.messages)}]"] = place
        self.messages.append({"role": role, "content": content, **more})
        return self.messages[-1]


def object_in(value: Any, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """An object with no other fields than these; an empty one for None. Raises: APIError."""
    for field in any_object_in(value, name):
        if field not in fields:
            raise unknown(field, name)
    return value or {}


def any_object_in(value: Any, name: str) -> dict[str, Any]:
    """An object; an empty one for None. Raises: APIError."""
    if value is not None and not isinstance(value, dict):
        raise wrong(name, "must be an object")
    return value or {}


def list_in(value: Any, name: str, what: str) -> list[Any]:
    """A list; an empty one for None. Raises: APIError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(name, f"must be a list of {what}")
    return value


def few_in(value: Any, name: str, what: str) -> list[Any]:
    """A list of no more than a chat may have messages, to be asked before any of it is read. Raises: APIError."""
    if len(found := list_in(value, name, what)) > MAX_MESSAGES:
        raise wrong(name, f"has {len(found):,} {what}; {MAX_MESSAGES:,} is the most")
    return found


def text_in(value: Any, name: str) -> str:
    """A text. Raises: APIError."""
    if not isinstance(value, str):
        raise wrong(name, "must be a text")
    return value


def type_of(value: Any, name: str) -> str:
    """The type that an object says. Raises: APIError: it is no object, or has no type."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong(name, "must be an object with 'type'")
    return str(value["type"])


def other_type(name: str, kind: str) -> APIError:
    """The error for an object of a type that this server does not support."""
    return unsupported(name, f"of type {shown(kind)}")
