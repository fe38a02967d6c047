"""Anthropic's Messages API: messages of blocks, and its form of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.server.answer.form import Form
from launch.server.answer.logprobs import TokenTexts
from launch.server.dialects.message_form import MessageForm, error_body
from launch.server.dialects.translating import (
    Translated,
    any_object_in,
    few_in,
    list_in,
    object_in,
    other_type,
    text_in,
    type_of,
)
from launch.server.errors import APIError, missing, wrong
from launch.server.request.fields import ChatRequest, CompletionRequest

THINKING = {"enabled": True, "disabled": False, "adaptive": None}
"""Value that a chat template is given for each type of `thinking`; None: nothing."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Messages(Translated):
    """/v1/messages."""

    path = "/v1/messages"
    own: Mapping[str, str] = {
        "messages": "messages",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }
    idle = (
        *("metadata", "service_tier", "cache_control", "inference_geo", "context_management"),
        *("system", "thinking", "output_config", "stop_sequences", "max_tokens", "chat_template_kwargs"),
    )
    refused: Mapping[str, str] = {
        "mcp_servers": "call their tools from the client",
        "container": "leave it out",
        "output_format": "use 'output_config'",
    }
    needs_length = True

    def translated(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = self.rest(body, ("messages", "tools", "tool_choice"))
        if self.needs_length and body.get("max_tokens") is None:
            raise missing("max_tokens")
        if body.get("system") is not None:
            self.say("system", "system", _texts(body["system"], "system"))
        if body.get("messages") is None:
            raise missing("messages")
        for number, message in enumerate(few_in(body["messages"], "messages", "messages")):
            self._read_message(message, f"messages[{number}]")
        config = object_in(body.get("output_config"), "output_config", ("format", "effort"))
        tools = [self._tool(tool, number) for number, tool in enumerate(list_in(body.get("tools"), "tools", "tools"))]
        return chat | {
            "messages": self.messages,
            "max_tokens": body.get("max_tokens"),
            "stop": None
            if body.get("stop_sequences") is None
            else list_in(body["stop_sequences"], "stop_sequences", "texts"),
            "response_format": _format(config.get("format")),
            "chat_template_kwargs": _variables(body, config.get("effort")),
            "tools": tools,
            **_choice(body.get("tool_choice")),
        }

    def form(self, identity: str, model: str, read: ChatRequest | CompletionRequest, texts: TokenTexts) -> Form:
        return MessageForm(identity, model)

    def error(self, error: APIError) -> dict[str, Any]:
        return error_body(error)

    # The conversation.

    def _read_message(self, message: Any, place: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise wrong(f"{place}.role", "must be user or assistant; what the system says is in 'system'")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not blocks:
            raise wrong(f"{place}.content", "must be a text, or a list of blocks")
        numbered = list(enumerate(few_in(blocks, f"{place}.content", "blocks")))
        (self._say_blocks if role == "assistant" else self._ask_blocks)(numbered, place)

    # Texts are joined once: added to each other, those of many blocks would be copied for each.

    def _ask_blocks(self, blocks: list[tuple[int, Any]], place: str) -> None:
        """Read blocks of the user. Text after a result of a tool is a message of its own."""
        texts = list[str]()

        def end_message() -> None:
            if texts:
                self.say(place, "user", "".join(texts))
                texts.clear()

        for number, block in blocks:
            name = f"{place}.content[{number}]"
            if (kind := type_of(block, name)) == "text":
                texts.append(text_in(block.get("text"), f"{name}.text"))
            elif kind == "tool_result":
                end_message()
                self._result(block, name)
            else:
                raise other_type(name, kind)
        end_message()

    def _say_blocks(self, blocks: list[tuple[int, Any]], place: str) -> None:
        """Read blocks of the assistant, which are one message."""
        said, texts, thoughts = self.say(place, "assistant", ""), list[str](), list[str]()
        for number, block in blocks:
            name = f"{place}.content[{number}]"
            if (kind := type_of(block, name)) == "text":
                texts.append(text_in(block.get("text"), f"{name}.text"))
            elif kind == "thinking":
                thoughts.append(text_in(block.get("thinking"), f"{name}.thinking"))
            elif kind == "tool_use":
                self._call(said, block, name)
            else:
                raise other_type(name, kind)
        said["content"] = "".join(texts)
        if thoughts:
            said["reasoning_content"] = "".join(thoughts)

    def _call(self, said: dict[str, Any], block: dict[str, Any], place: str) -> None:
        calls = said.setdefault("tool_calls", [])
        call = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {call: place, f"{call}.function": place, f"{call}.function.arguments": f"{place}.input"}
        function = {"name": block.get("name"), "arguments": block.get("input")}
        calls.append({"id": block.get("id"), "type": "function", "function": function})

    def _result(self, block: dict[str, Any], place: str) -> None:
        content = block.get("content")
        text = "" if content is None else _texts(content, f"{place}.content")
        if block.get("is_error"):  # which templates have no place for
            text = f"Error: {text}"
        self.say(place, "tool", text, tool_call_id=text_in(block.get("tool_use_id"), f"{place}.tool_use_id"))

    def _tool(self, tool: Any, number: int) -> dict[str, Any]:
        place = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise wrong(place, "must be an object with 'name' and 'input_schema'")
        if tool.get("type") not in (None, "custom"):
            raise other_type(place, type_of(tool, place))
        self.names |= {f"{place}.function": place, f"{place}.function.parameters": f"{place}.input_schema"}
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


class CountedMessages(Messages):
    """/v1/messages/count_tokens, which takes what /v1/messages does, and no length."""

    path = "/v1/messages/count_tokens"
    needs_length = False


def _texts(content: Any, name: str) -> str:
    """A text, or the text of blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(few_in(content, name, "blocks")):
        if (kind := type_of(block, f"{name}[{number}]")) != "text":
            raise other_type(f"{name}[{number}]", kind)
        texts.append(text_in(block.get("text"), f"{name}[{number}].text"))
    return "".join(texts)


def _variables(body: Mapping[str, Any], effort: Any) -> dict[str, Any]:
    """Variables of the chat template, which reads them if the model can reason."""
    given = any_object_in(body.get("chat_template_kwargs"), "chat_template_kwargs")
    variables: dict[str, Any] = {}
    if body.get("thinking") is not None:
        kind = type_of(body["thinking"], "thinking")
        if kind not in THINKING:
            raise wrong("thinking.type", f"must be one of {', '.join(THINKING)}")
        if (enabled := THINKING[kind]) is not None:
            variables["enable_thinking"] = enabled
    if effort is not None:
        variables["reasoning_effort"] = text_in(effort, "output_config.effort")
    return variables | given


def _format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if (kind := type_of(given, "output_config.format")) != "json_schema":
        raise other_type("output_config.format", kind)
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _choice(given: Any) -> dict[str, Any]:
    """The fields `tool_choice` and `parallel_tool_calls` of a chat."""
    if given is None:
        return {}
    kind = type_of(given, "tool_choice")
    alone = given.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    several = {} if alone is None else {"parallel_tool_calls": not alone}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": given.get("name")}}} | several
    if kind not in CHOICES:
        raise wrong("tool_choice.type", f"must be one of {', '.join(CHOICES)}, tool")
    return {"tool_choice": CHOICES[kind]} | several
