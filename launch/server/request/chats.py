"""Prompts of chats, by the model's chat template, and what parts the answers may have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.server.answer.calls import CALL_FORMS, GUIDED, CallForm, ToolForm, form_of_template
from launch.server.answer.parser import Parts
from launch.server.errors import APIError, shown, wrong
from launch.server.request.fields import ChatRequest
from launch.server.request.messages import Message
from launch.server.request.tool_texts import FORM, with_tools_as_text, without_system
from policies.prompt_cache.model_text import render


class Chats:
    """The chats of one model.

    Args:
        tokenizer: the model's; None if it has none.
        tools: form in which the model calls tools.
    """

    def __init__(self, tokenizer: Any | None, *, tools: ToolForm) -> None:
        self._tokenizer, template = tokenizer, _template_of(tokenizer)
        self._has_template = bool(template)
        self._may_describe = tools is not ToolForm.none
        self._takes_tools = re.search(r"\btools\b", template) is not None
        form = form_of_template(template) if tools is ToolForm.auto else tools
        self._form = CALL_FORMS.get(form)

    def prompt(self, request: ChatRequest) -> tuple[str, Parts]:
        """The prompt of a chat, and what parts its answers may have.

        Raises:
            APIError: the model has no template, or one that fails or takes no tools where they may not be described.
        """
        if not self._has_template:
            raise APIError(400, "this model has no chat template; use /v1/completions", param="messages")
        text, form = self._text(request)
        tools = request.tools
        calls = None
        if tools.told:
            calls = GUIDED if tools.to_call else form
        return text, Parts(calls=calls, known=tools.names, at_most_one=tools.several is False)

    def _text(self, request: ChatRequest) -> tuple[str, CallForm | None]:
        """The prompt, and the form in which it has calls."""
        messages, tools = request.messages, request.tools.told
        if tools:
            text = self._rendered(messages) if self._takes_tools else ""
            told = self._rendered(messages, tools=tools) if self._takes_tools else ""
            if told != text:
                return told, self._form
            if not self._may_describe:
                rule = "are not in this model's chat template, so it would not know of them; leave them out"
                raise wrong(
                    "tools", f"{rule}, or start the server without serve.tools=none", code="unsupported_parameter"
                )
        elif self._takes_tools or not self._may_describe or not any(map(_is_of_tools, messages)):
            return self._rendered(messages), self._form
        said = with_tools_as_text(messages, tools)
        try:
            return self._rendered(said), CALL_FORMS[FORM]
        except APIError:  # it may take no message of the system
            if not said or said[0]["role"] not in ("system", "developer"):
                raise
            return self._rendered(without_system(said)), CALL_FORMS[FORM]

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        # A template has the assistant answer next, or go on with what it has begun to say; after a call it cannot.
        last = messages[-1]
        goes_on = last["role"] == "assistant" and "tool_calls" not in last
        how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
        try:
            return render(self._tokenizer, messages, **how, **options)
        except ValueError as error:
            raise wrong("messages", f"do not fit the model's chat template: {shown(str(error), 200)}") from error


def _template_of(tokenizer: Any | None) -> str:
    """Text of a chat template, or of all that a model has by name; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message
