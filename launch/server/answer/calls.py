"""Forms in which models write calls of tools, as texts around JSON, and how such JSON is read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

from launch.server.request.reader import MAX_DEPTH, is_deeper, parsed

MAX_NAME = 256
"""Most characters of the name of a tool, and of a call."""
NOTHING = object()
"""Value of text that is no JSON."""


class ToolForm(Enum):
    """Form in which a model calls tools."""

    auto = "auto"
    hermes = "hermes"
    llama3 = "llama3"
    mistral = "mistral"
    none = "none"


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """A form of calls.

    Attributes:
        begin: text before each call, or before several in a list; often a special token.
        end: text after it; empty if nothing ends it but its JSON.
        is_bare: calls may stand without `begin` where an answer begins, and after one another.
        others: more special tokens that are a part of calls.
        is_certain: an answer is nothing but calls, as a grammar has led it to, so their arguments are told at once.
    """

    begin: str = ""
    end: str = ""
    is_bare: bool = False
    others: tuple[str, ...] = ()
    is_certain: bool = False

    @property
    def tokens(self) -> list[str]:
        """Texts that may be special tokens."""
        return [text for text in (self.begin, self.end, *self.others) if text]


CALL_FORMS = {
    ToolForm.hermes: CallForm(begin="<tool_call>", end="</tool_call>"),
    ToolForm.llama3: CallForm(begin="<|python_tag|>", is_bare=True),
    ToolForm.mistral: CallForm(begin="[TOOL_CALLS]", others=("[ARGS]", "[CALL_ID]")),
}
GUIDED = CallForm(is_bare=True, is_certain=True)
"""Form of answers that have to call a tool: a call, or a list of calls."""


def form_of_template(template: str) -> ToolForm:
    """The form in which a chat template shows calls to its model; none if it is unknown."""
    for form, call_form in CALL_FORMS.items():
        if call_form.begin in template:
            return form
    is_llama = "<|start_header_id|>" in template and re.search(r"\btools\b", template) is not None
    return ToolForm.llama3 if is_llama else ToolForm.none


class JSONEnd:
    """Finds where an object or a list ends in text that comes piece by piece."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def find(self, text: str, start: int) -> int | None:
        """Place after the end in `text`, of which all before `start` was given before; None if it does not end yet."""
        for place in range(start, len(text)):
            character = text[place]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def calls_in(text: str, known: Collection[str] | None = None) -> list[tuple[str, str]] | None:
    """Name and arguments, as JSON text, of each call in an object or a list; None if it is no call.

    Args:
        known: names of which each call has to have one; None is any.
    """
    value = _read(text)
    calls = value if isinstance(value, list) else [value]
    read = [_call(each, known) for each in calls]
    return [call for call in read if call is not None] if read and None not in read else None


def arguments_of(value: Any) -> str | None:
    """Arguments as JSON text, if they are an object, JSON text of one, or None, which stands for an empty one."""
    value = _read(value) if isinstance(value, str) else value
    if value is None:
        return "{}"
    return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else None


def _call(value: Any, known: Collection[str] | None) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = arguments_of(value.get("arguments", value.get("parameters")))
    if not isinstance(name, str) or not name or arguments is None or (known is not None and name not in known):
        return None
    return name, arguments


def _read(text: str) -> Any:
    """The value of JSON text; NOTHING if it is none, or deeper than this server takes it."""
    try:
        value = parsed(text)
    except (ValueError, RecursionError):
        return NOTHING
    return NOTHING if is_deeper(value, MAX_DEPTH) else value
