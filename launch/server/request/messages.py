"""Messages of a chat, checked, in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from launch.server.errors import missing, shown, wrong
from launch.server.request.reader import MAX_DEPTH, Fields, check_unicode, is_deeper, parsed, unsupported
from launch.server.request.tools import is_function

MAX_MESSAGES = 10_000
MAX_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_SAY_NOTHING = ("assistant", "tool")
"""Roles whose content may be missing, null or empty: an answer that only calls tools, and a result without text."""
TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Name of the text in a part of a content, by the part's type."""

Message = dict[str, Any]
"""Role, content of text, and what templates read of calls (tool_calls, tool_call_id) and of reasoning_content."""


def read_messages(fields: Fields, *, may_be_empty: bool = False) -> list[Message]:
    """The messages of a chat. Raises: APIError."""
    messages = fields.take(
        "messages",
        lambda value: isinstance(value, list) and (bool(value) or may_be_empty),
        "must be a list of messages",
    )
    if messages is None and may_be_empty:
        return []
    if messages is None:
        raise missing("messages")
    if len(messages) > MAX_MESSAGES:
        raise wrong("messages", f"has {len(messages):,} messages; {MAX_MESSAGES:,} is the most")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(name, "must be an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    content, taken = message.get("content"), {"role", "content"}
    if role == "assistant" and content is None:
        content = message.get("refusal")  # which is then all that it said
        taken.add("refusal")
    # Templates print a missing content in their own ways, and an empty text as nothing.
    is_silent = role in MAY_SAY_NOTHING and content in (None, [])
    read: Message = {"role": role, "content": "" if is_silent else _content(content, f"{name}.content")}
    reasoning = None
    if role == "assistant":
        given = [message.get(field) for field in ("reasoning_content", "reasoning")]
        reasoning = next((each for each in given if each is not None), None)
    if reasoning is not None:
        read["reasoning_content"] = _text(reasoning, f"{name}.reasoning_content")
        taken.add("reasoning")
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _calls(message["tool_calls"], f"{name}.tool_calls")
    if role == "tool" and message.get("tool_call_id") is not None:
        read["tool_call_id"] = _text(message["tool_call_id"], f"{name}.tool_call_id")
    if message.get("name") is not None:
        read["name"] = _text(message["name"], f"{name}.name")
    for field, value in message.items():
        if field not in taken | read.keys() and value is not None and value != []:
            raise unsupported(f"{name}.{shown(field)}")
    return read


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return _text(content, name)
    if not isinstance(content, list) or not content:
        raise wrong(name, "must be a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        said = TEXT_OF.get(kind) if isinstance(kind, str) else None
        if said is None or not isinstance(part.get(said), str):
            raise wrong(f"{name}[{number}]", 'must be {"type": "text", "text": ...}; this server takes text only')
        texts.append(_text(part[said], f"{name}[{number}].{said}"))
    return "".join(texts)


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Calls of tools. Their arguments are JSON text in the API, and the object itself in templates."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise wrong(name, f"must be a list of at most {MAX_CALLS} calls")
    read = []
    for number, call in enumerate(calls):
        place = f"{name}[{number}]"
        function = call.get("function") if isinstance(call, dict) and is_function(call) else None
        if not isinstance(function, dict):
            raise wrong(place, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
        identity = {} if call.get("id") is None else {"id": _text(call["id"], f"{place}.id")}
        said = {
            "name": _text(function.get("name"), f"{place}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
        }
        read.append({**identity, "type": "function", "function": said})
    return read


def _arguments(given: Any, name: str) -> dict[str, Any]:
    """The arguments of a call: JSON text, or the object itself. A call without any has none, null or an empty text."""
    value = given
    if isinstance(given, str):
        try:
            value = parsed(_text(given, name)) if given.strip() else None
        except (ValueError, RecursionError):
            value = given
    value = {} if value is None else value
    if not isinstance(value, dict) or is_deeper(value, MAX_DEPTH):
        raise wrong(name, "must be an object as JSON text")
    check_unicode(json.dumps(value, ensure_ascii=False), name)
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, "must be a text")
    check_unicode(value, name)
    return value
