"""Messages and tools of a chat, checked, in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from launch.server.errors import missing, shown, wrong
from launch.server.request.reader import MAX_DEPTH, Fields, check_unicode, is_deeper, unsupported

MAX_MESSAGES = 10_000
MAX_TOOLS, MAX_CALLS = 128, 128
ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_SAY_NOTHING = ("assistant", "tool")
"""Roles whose content may be missing, null or empty: an answer that only calls tools, and a result without text."""
TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Name of the text in a part of a content, by the part's type."""

Message = dict[str, Any]
"""Role, content of text, and for calls of tools what templates read: tool_calls, tool_call_id."""


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


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools that the model is told of; none with `"tool_choice": "none"`. Raises: APIError."""
    tools = fields.take("tools", lambda value: isinstance(value, list), "must be a list of tools") or []
    choice = fields.take("tool_choice", lambda value: True, "")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "other than none and auto")
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"has {len(tools):,} tools; {MAX_TOOLS} is the most")
    for number, tool in enumerate(tools):
        name = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) and _is_function(tool) else None
        if not isinstance(function, dict):
            raise wrong(name, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong(f"{name}.function.name", "must be a text")
        if not isinstance(function.get("description") or "", str):
            raise wrong(f"{name}.function.description", "must be a text")
        if not isinstance(function.get("parameters") or {}, dict):
            raise wrong(f"{name}.function.parameters", "must be a JSON schema")
        check_unicode(json.dumps(tool, ensure_ascii=False), name)
    return [] if choice == "none" else [tool | {"type": "function"} for tool in tools]


def _is_function(value: dict[str, Any]) -> bool:
    """Whether a tool, or a call, is that of a function, as it is where its type is left out."""
    return value.get("type") in (None, "function")


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
        function = call.get("function") if isinstance(call, dict) and _is_function(call) else None
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
            value = json.loads(_text(given, name)) if given.strip() else None
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
