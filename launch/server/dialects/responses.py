"""OpenAI's Responses API, without memory: each request has all of its conversation, as a list of items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.server.answer.form import Form
from launch.server.answer.logprobs import TokenTexts
from launch.server.dialects.response_form import ResponseForm
from launch.server.dialects.translating import (
    HANDED_OVER,
    Translated,
    any_object_in,
    few_in,
    list_in,
    object_in,
    other_type,
    text_in,
    type_of,
)
from launch.server.errors import missing, wrong
from launch.server.request.fields import ChatRequest, CompletionRequest

ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that this server refuses. The others are of tools that it does not have, or of what it gives."""

MOST_PAIRS, LONGEST_KEY, LONGEST_TEXT = 16, 64, 512
"""Limits of `metadata`, as at OpenAI: pairs, characters of a key, and of a value or another text in a response."""


class Responses(Translated):
    """/v1/responses."""

    path = "/v1/responses"
    own: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    absent = ("n", "logprobs", "prompt_cache", "return_progress", *HANDED_OVER)
    idle = (
        *("include", "max_tool_calls", "prompt_cache_retention", "prompt_cache_options", "stream_options"),
        *("truncation", "moderation", "text", "reasoning", "input", "instructions", "max_output_tokens"),
    )
    refused: Mapping[str, str] = {
        "previous_response_id": "it keeps no responses: send the items of the conversation in 'input'",
        "conversation": "it keeps no conversations: send the items in 'input'",
        "background": "send the request without it, and wait or stream",
        "prompt": "it keeps no prompts: send the text in 'instructions' and 'input'",
        "context_management": "leave it out",
        "top_logprobs": "leave it out",
    }

    def translated(self, body: dict[str, Any]) -> dict[str, Any]:
        self._body = body
        chat = self.rest(body, ("tools", "tool_choice"))
        if body.get("truncation") not in (None, "disabled"):
            raise wrong("truncation", "must be disabled; this server leaves out nothing", code="unsupported_value")
        if LOGPROBS in list_in(body.get("include"), "include", "texts"):
            raise wrong("include", f"has {LOGPROBS}, which this server does not give", code="unsupported_value")
        _check_repeated(body)
        object_in(body.get("stream_options"), "stream_options", ("include_obfuscation",))
        if body.get("instructions") is not None:
            self.say("instructions", "system", text_in(body["instructions"], "instructions"))
        self._read_input(body.get("input"))
        text = object_in(body.get("text"), "text", ("format", "verbosity"))
        reasoning = object_in(body.get("reasoning"), "reasoning", ("effort", "summary", "generate_summary", "context"))
        for name, value in (("text.verbosity", text.get("verbosity")), *_named(reasoning, "reasoning")):
            _check_short(value, name)
        tools = [self._tool(tool, number) for number, tool in enumerate(list_in(body.get("tools"), "tools", "tools"))]
        return chat | {
            "messages": self.messages,
            "max_completion_tokens": body.get("max_output_tokens"),
            "response_format": _format(text.get("format")),
            "reasoning_effort": reasoning.get("effort"),
            "tools": tools,
            "tool_choice": _choice(body.get("tool_choice")),
        }

    def form(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> Form:
        return ResponseForm(identity, model, self._body)

    # The conversation.

    def _read_input(self, given: Any) -> None:
        if given is None:
            raise missing("input")
        if isinstance(given, str):
            self.say("input", "user", given)
            return
        if not isinstance(given, list) or not given:
            raise wrong("input", "must be a text, or a list of items")
        for number, item in enumerate(few_in(given, "input", "items")):
            self._read_item(item, f"input[{number}]")

    def _read_item(self, item: Any, place: str) -> None:
        if isinstance(item, dict) and "role" in item and item.get("type") in (None, "message"):
            if item["role"] not in ROLES:
                raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
            if item["role"] == "assistant":
                self._answer(place, content=item.get("content"))
            else:
                self.say(place, item["role"], item.get("content"))
            return
        kind = type_of(item, place)
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            self._answer(place, call={"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            self.say(place, "tool", item.get("output"), tool_call_id=item.get("call_id"))
        elif kind == "reasoning":
            if (text := _reasoning(item, place)) is not None:
                self._answer(place, reasoning=text)
        elif kind == "item_reference":
            raise wrong(place, "is a reference, and this server keeps no items; send the item itself")
        else:
            raise other_type(place, kind)

    def _answer(self, place: str, *, content: Any = None, reasoning: str | None = None, call: Any = None) -> None:
        """Add an item to the assistant's message that it belongs to: reasoning, then text, then calls."""
        last = self.messages[-1] if self.messages and self.messages[-1]["role"] == "assistant" else {}
        is_more_text = content is not None and last.get("content") is not None and "tool_calls" not in last
        if not last or reasoning is not None or is_more_text:
            last = self.say(place, "assistant", None)
        message = f"messages[{len(self.messages) - 1}]"
        self.names |= {f"{message}.content": f"{place}.content"} if content is not None else {}
        if content is not None:  # text after a call comes before it
            if last["content"] is None:
                last["content"] = list(content) if isinstance(content, list) else content
            else:  # into the same list: a new one for each of many items would copy all before it
                last["content"] = _parts(last["content"])
                last["content"] += _parts(content)
        if reasoning is not None:
            last["reasoning_content"] = reasoning
        if call is not None:
            number = len(last.setdefault("tool_calls", []))
            called = f"{message}.tool_calls[{number}]"
            self.names |= {called: place, f"{called}.function": place, f"{called}.id": f"{place}.call_id"}
            last["tool_calls"].append(call)

    # Tools.

    def _tool(self, tool: Any, number: int) -> dict[str, Any]:
        place = f"tools[{number}]"
        if (kind := type_of(tool, place)) != "function":
            raise other_type(place, kind)
        self.names[f"{place}.function"] = place
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        return {"type": "function", "function": function}


class CountedResponses(Responses):
    """/v1/responses/input_tokens."""

    path = "/v1/responses/input_tokens"

    def counted(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", **super().counted(num_tokens)}


def _check_repeated(body: Mapping[str, Any]) -> None:
    """Check what a response repeats and nothing else reads. Raises: APIError."""
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        _check_short(body.get(name), name)
    most = body.get("max_tool_calls")
    if most is not None and (type(most) is not int or not 0 < most < 2**31):
        raise wrong("max_tool_calls", "must be a whole number of at least 1")
    metadata = any_object_in(body.get("metadata"), "metadata")
    if len(metadata) > MOST_PAIRS:
        raise wrong("metadata", f"has {len(metadata):,} pairs; {MOST_PAIRS} is the most")
    if any(len(key) > LONGEST_KEY for key in metadata):
        raise wrong("metadata", f"must have keys of at most {LONGEST_KEY} characters")
    for value in metadata.values():
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise wrong("metadata", f"must have values that are texts of at most {LONGEST_TEXT} characters")


def _check_short(value: Any, name: str) -> None:
    if value is not None and (not isinstance(value, str) or len(value) > LONGEST_TEXT):
        raise wrong(name, f"must be a text of at most {LONGEST_TEXT} characters")


def _named(values: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return [(f"{name}.{field}", value) for field, value in values.items()]


def _parts(content: Any) -> list[Any]:
    """Content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "output_text", "text": content}]


def _reasoning(item: dict[str, Any], place: str) -> str | None:
    """Text of an item of reasoning; None if it has none that this server can read."""
    for name in ("content", "summary"):
        parts = list_in(item.get(name), f"{place}.{name}", "parts")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if texts:
            return "".join(text_in(text, f"{place}.{name}[{number}].text") for number, text in enumerate(texts))
    if item.get("encrypted_content") is not None:
        raise wrong(place, "has encrypted content alone, which another server has made; leave the item out")
    return None


def _format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if type_of(given, "text.format") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if (kind := type_of(given, "tool_choice")) != "function":
        raise other_type("tool_choice", kind)
    return {"type": "function", "function": {"name": given.get("name")}}
