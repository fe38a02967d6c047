"""Prompts of chats, by the model's chat template, and what parts the answers may have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from launch.server.answer.calls import CALL_FORMS, GUIDED, CallForm, ToolForm, form_of_template
from launch.server.answer.parser import BEGIN_REASONING, END_REASONING, Parts
from launch.server.errors import APIError, shown, wrong
from launch.server.options import Reasoning
from launch.server.request.fields import ChatRequest
from launch.server.request.messages import Message
from launch.server.request.template_variables import effort_variables
from launch.server.request.tool_texts import FORM, with_tools_as_text, without_system
from policies.prompt_cache.model_text import render


class Chats:
    """The chats of one model.

    Args:
        tokenizer: the model's; None if it has none.
        tools: form in which the model calls tools.
        reasoning: whether its answers begin with reasoning.
        variables: of the template, for requests that do not give these themselves.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        tools: ToolForm = ToolForm.auto,
        reasoning: Reasoning = Reasoning.auto,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer, self._variables = tokenizer, dict(variables)
        self._template = template = _template_of(tokenizer)
        self._reasons = END_REASONING in template if reasoning is Reasoning.auto else reasoning is Reasoning.think
        self._may_describe = tools is not ToolForm.none
        self._takes_developers = "developer" in template
        self._takes_tools = re.search(r"\btools\b", template) is not None
        form = form_of_template(template) if tools is ToolForm.auto else tools
        self._form = CALL_FORMS.get(form)

    def prompt(self, request: ChatRequest) -> tuple[str, Parts]:
        """The prompt of a chat, and what parts its answers may have.

        Raises:
            APIError: the model has no template, or one that fails or takes no tools where they may not be described.
        """
        if not self._template:
            raise APIError(400, "this model has no chat template; use /v1/completions", param="messages")
        options = self._variables | effort_variables(request.effort, self._template) | request.variables
        # A template has the assistant answer next, or go on with what it has begun to say.
        options |= {"continue_final_message" if _goes_on(request.messages) else "add_generation_prompt": True}
        text, form = self._text(request, options)
        tools, calls = request.tools, None
        if tools.told:
            # Another guide leads the whole answer, in which what looks like a call is what was asked for.
            calls = GUIDED if tools.to_call else None if request.guided_by else form
        parts = Parts(calls=calls, known=tools.names, at_most_one=tools.several is False)
        return text, self._with_reasoning(parts, text, request.messages) if self._reasons else parts

    def _with_reasoning(self, parts: Parts, text: str, messages: Sequence[Message]) -> Parts:
        """Parts of an answer that may begin with reasoning, unless the prompt has ended it or has the answer begun."""
        begun = str(messages[-1]["content"]) if _goes_on(messages) else text.rstrip()[-len(BEGIN_REASONING) :]
        is_open = begun.rfind(BEGIN_REASONING) > begun.rfind(END_REASONING)
        is_over = _goes_on(messages) or text.rstrip().endswith(END_REASONING)
        return replace(parts, reasons=is_open or not is_over, in_reasoning=is_open)

    def _text(self, request: ChatRequest, options: dict[str, Any]) -> tuple[str, CallForm | None]:
        """The prompt, by these options of the template, and the form in which it has calls."""
        messages, tools = request.messages, request.tools.told
        if tools:
            text = self._rendered(messages, options) if self._takes_tools else ""
            told = self._rendered(messages, options | {"tools": tools}) if self._takes_tools else ""
            if told != text:
                return told, self._form
            if not self._may_describe:
                rule = "are not in this model's chat template, so it would not know of them; leave them out, or start"
                raise wrong("tools", f"{rule} the server without serve.tools=none", code="unsupported_parameter")
        elif self._takes_tools or not self._may_describe or not any(map(_is_of_tools, messages)):
            return self._rendered(messages, options), self._form
        said = with_tools_as_text(messages, tools)
        try:
            return self._rendered(said, options), CALL_FORMS[FORM]
        except APIError:  # it may take no message of the system
            if not said or said[0]["role"] not in ("system", "developer"):
                raise
            return self._rendered(without_system(said), options), CALL_FORMS[FORM]

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        if not self._takes_developers:  # it would print a word that the model does not know, or leave the message out
            messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
        try:
            return render(self._tokenizer, messages, **options)
        except ValueError as error:
            raise wrong("messages", f"do not fit the model's chat template: {shown(str(error), 200)}") from error


def _goes_on(messages: Sequence[Message]) -> bool:
    """Whether an answer goes on with the last message. After a call it cannot."""
    return messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _template_of(tokenizer: Any | None) -> str:
    """Text of a chat template, or of all that a model has by name; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message
