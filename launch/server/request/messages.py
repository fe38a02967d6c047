"""Messages and tools of a chat, checked, in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from launch.server.errors import shown, wrong
from launch.server.request.reader import MAX_DEPTH, Fields, check_unicode, is_deeper, unsupported

MAX_MESSAGES = 10_000
MAX_TOOLS, MAX_CALLS = 128, 128
ROLES = ("system", "developer", "user", "assistant", "tool")

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
        raise wrong("messages", "is missing")
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
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise wrong(name, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        function = tool["function"]
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong(f"{name}.function.name", "must be a text")
        if not isinstance(function.get("description") or "", str):
            raise wrong(f"{name}.function.description", "must be a text")
        if not isinstance(function.get("parameters") or {}, dict):
            raise wrong(f"{name}.function.parameters", "must be a JSON schema")
        check_unicode(json.dumps(tool, ensure_ascii=False), name)
    return [] if choice == "none" else tools


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(name, "must be an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls") if role == "assistant" else None
    # Templates print a missing content in their own ways, and an empty text as nothing.
    content = "" if calls and message.get("content") is None else _content(message.get("content"), f"{name}.content")
    read: Message = {"role": role, "content": content}
    if calls:
        read["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    if role == "tool":
        read["tool_call_id"] = _text(message.get("tool_call_id"), f"{name}.tool_call_id")
    for field, value in message.items():
        if field in read or value is None or value == []:
            continue
        if field == "name":
            read["name"] = _text(value, f"{name}.name")
        else:
            raise wrong(f"{name}.{shown(field)}", "is not supported by this server; leave it out")
    return read


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return _text(content, name)
    if not isinstance(content, list) or not content:
        raise wrong(name, "must be a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{name}[{number}]", 'must be {"type": "text", "text": ...}; this server takes text only')
        texts.append(_text(part["text"], f"{name}[{number}].text"))
    return "".join(texts)


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Calls of tools. Their arguments are JSON text in the API, and the object itself in templates."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise wrong(name, f"must be a list of at most {MAX_CALLS} calls")
    read = []
    for number, call in enumerate(calls):
        place = f"{name}[{number}]"
        function = call.get("function") if isinstance(call, dict) and call.get("type") == "function" else None
        if not isinstance(function, dict):
            raise wrong(place, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
        read.append(
            {
                "id": _text(call.get("id"), f"{place}.id"),
                "type": "function",
                "function": {
                    "name": _text(function.get("name"), f"{place}.function.name"),
                    "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
                },
            }
        )
    return read


def _arguments(text: Any, name: str) -> dict[str, Any]:
    try:
        value = json.loads(_text(text, name))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or is_deeper(value, MAX_DEPTH):
        raise wrong(name, "must be an object as JSON text")
    check_unicode(json.dumps(value, ensure_ascii=False), name)
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, "must be a text")
    check_unicode(value, name)
    return value
