"""Tools, calls and results as plain text, for chat templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from launch.server.answer.calls import CALL_FORMS, ToolForm
from launch.server.request.messages import Message

FORM = ToolForm.hermes
"""Form in which the text asks for calls."""

DESCRIPTION = """You may call these functions, given as JSON, each with a JSON schema of its arguments:

{tools}

To call one, answer with JSON of its name and arguments in this form:

{begin}
{{"name": "function", "arguments": {{"argument": "value"}}}}
{end}"""


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages of system, user and assistant alone, of which the first describes the tools."""
    said = list[Message]()
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant" and "tool_calls" in message:
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            said.append(message | {"content": "\n".join([content] * bool(content) + calls)})
            del said[-1]["tool_calls"]
            continue
        result = role == "tool"
        text = f"<tool_response>\n{content}\n</tool_response>" if result else content
        if said and (result or role == "user") and "is_result" in said[-1]:  # roles have to alternate in some templates
            said[-1]["content"] += f"\n{text}"
        else:
            said.append({"role": "user", "content": text} if result else dict(message))
        if result:
            said[-1]["is_result"] = True
    said = [{name: value for name, value in message.items() if name != "is_result"} for message in said]
    if not tools:
        return said
    text, has_system = _description(tools), bool(said) and said[0]["role"] in ("system", "developer")
    if has_system and said[0]["content"]:
        text = f"{said[0]['content']}\n\n{text}"
    return [{"role": said[0]["role"] if has_system else "system", "content": text}, *said[has_system:]]


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Messages of which the first user's begins with what the system says, for templates without a system."""
    first, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": first["content"]}, *rest]


def _description(tools: Sequence[dict[str, Any]]) -> str:
    form = CALL_FORMS[FORM]
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return DESCRIPTION.format(tools=functions, begin=form.begin, end=form.end)


def _call(function: dict[str, Any]) -> str:
    form, call = CALL_FORMS[FORM], {name: function[name] for name in ("name", "arguments")}
    return f"{form.begin}\n{json.dumps(call, ensure_ascii=False)}\n{form.end}"
