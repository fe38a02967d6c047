"""Tools of a chat, checked: which the model is told of, and which an answer has to call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from launch.server.answer.calls import MAX_NAME
from launch.server.errors import shown, wrong
from launch.server.request.reader import Fields, check_unicode, unsupported
from runahead.model.grammars import LAYOUT

MAX_TOOLS = 128
MAX_CHARACTERS = 100_000
"""Most characters of the schemas of tools that an answer has to follow."""
OPENS = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("$ref", "allOf", "anyOf", "oneOf", "minProperties"),
    )
)
"""Keywords of a schema by which an object may have more properties than those of `properties`."""
CLOSED = {"additionalProperties": False}
CHOICE = 'must be none, auto, required or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Tools of a chat.

    Attributes:
        told: those that the model is told of, as chat templates take them.
        to_call: those of which the answer has to call one; empty if it may say something else.
        several: whether it may call several, or one several times; None: as the model likes, but one that has to be
            called is called once.
    """

    told: list[dict[str, Any]]
    to_call: list[dict[str, Any]]
    several: bool | None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.told)

    @property
    def grammar(self) -> str:
        """Grammar of an answer that calls tools, in llguidance's form of Lark: a call, or with `several` a list.

        Keywords of a schema that llguidance does not know are left out, unless the tool is strict. Where the schema has
        properties, other arguments may not be given, unless it requires them or says something about them: a model
        without much sense would invent them. A function without a schema has no arguments, as at OpenAI's.
        """
        rules, names = list[str](), list[str]()
        for number, tool in enumerate(self.to_call):
            function, name = tool["function"], f"call_{number}"
            begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
            options = LAYOUT | {"lenient": function.get("strict") is not True}
            schema = _closed(function.get("parameters")) | {"type": "object", "x-guidance": options}
            rules.append(f'{name}: {json.dumps(begin, ensure_ascii=False)} %json {json.dumps(schema)} "}}"')
            names.append(name)
        start = '"[" call (", " call)* "]"' if self.several else "call"
        return "\n".join((f"start: {start}", f"call: {' | '.join(names)}", *rules))


def read_tools(fields: Fields) -> Tools:
    """The tools of a chat, none of which are told with `"tool_choice": "none"`. Raises: APIError."""
    tools = fields.take("tools", lambda value: isinstance(value, list), "must be a list of tools") or []
    choice = fields.take("tool_choice", lambda value: True, "")
    several = fields.take("parallel_tool_calls", lambda value: isinstance(value, bool), "must be true or false")
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"has {len(tools):,} tools; {MAX_TOOLS} is the most")
    told = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if choice in (None, "auto"):
        return Tools(told=told, to_call=[], several=several)
    if choice == "none":
        return Tools(told=[], to_call=[], several=several)
    to_call = _to_call(choice, told)
    for tool in to_call:
        kind = (tool["function"].get("parameters") or {}).get("type") or "object"
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise wrong("tools", f"have '{shown(tool['function']['name'])}', whose parameters are no object")
    found = Tools(told=told, to_call=to_call, several=several and choice == "required")
    if len(found.grammar) > MAX_CHARACTERS:
        raise wrong("tools", f"have schemas of more than {MAX_CHARACTERS:,} characters in all")
    return found


def _to_call(choice: Any, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of which an answer has to call one, by the field `tool_choice`."""
    if isinstance(choice, dict) and choice.get("type") not in (None, "function"):
        raise unsupported("tool_choice", f"of type {shown(str(choice.get('type')))}")
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise wrong("tool_choice", CHOICE)
    if not told:
        raise wrong("tool_choice", "needs 'tools', of which one is to be called")
    if choice == "required":
        return told
    named = [tool for tool in told if tool["function"]["name"] == name]
    if not named:
        raise wrong("tool_choice", f"names the tool '{shown(str(name))}', which is not among 'tools'")
    return named[:1]


def _closed(schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments that may have no others than its properties and what it requires, if it has properties."""
    if schema is None:
        schema = {"properties": {}}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or OPENS.intersection(schema):
        return schema
    more = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return schema | {"properties": properties | {name: {} for name in more if name not in properties}} | CLOSED


def _tool(tool: Any, name: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and is_function(tool) else None
    if not isinstance(function, dict):
        raise wrong(name, 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if not isinstance(function.get("name"), str) or not 1 <= len(function["name"]) <= MAX_NAME:
        raise wrong(f"{name}.function.name", f"must be a text of 1 to {MAX_NAME} characters")
    if not isinstance(function.get("description"), str | None):
        raise wrong(f"{name}.function.description", "must be a text")
    if not isinstance(function.get("parameters"), dict | None):
        raise wrong(f"{name}.function.parameters", "must be a JSON schema")
    check_unicode(json.dumps(tool, ensure_ascii=False), name)
    return tool | {"type": "function"}


def is_function(value: dict[str, Any]) -> bool:
    """Whether a tool, or a call, is that of a function, as it is where its type is left out."""
    return value.get("type") in (None, "function")
