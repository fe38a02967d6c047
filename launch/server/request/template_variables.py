"""Variables of a chat template that a request may give."""

from __future__ import annotations

import json
from typing import Any

from launch.server.errors import shown, wrong
from launch.server.request.reader import Fields, check_unicode, unsupported

RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations"),
        *("documents", "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "sanitize_control_tokens", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "tools"),
        "truncation",
    )
)
"""What a template is given otherwise, or what says how transformers calls it."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def read_variables(fields: Fields) -> tuple[dict[str, Any], str | None]:
    """The fields `chat_template_kwargs` and `reasoning_effort`. Raises: APIError."""
    name = "chat_template_kwargs"
    given = fields.take(name, lambda value: isinstance(value, dict), "must be an object") or {}
    check_unicode(json.dumps(given, ensure_ascii=False), name)
    for variable in given:
        if variable in RESERVED:
            raise wrong(name, f"has '{variable}', which is not for requests to give")
    rule = f"must be one of {', '.join(EFFORTS)}"
    effort = fields.take("reasoning_effort", lambda value: value in EFFORTS, rule)
    return given, effort


def effort_variables(effort: str | None, template: str) -> dict[str, Any]:
    """Variables by which a template is told the effort of reasoning. Raises: APIError: it has none for that."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort != "none":
        raise unsupported("reasoning_effort", f"of {shown(effort)}, which this model's chat template does not read,")
    return {"enable_thinking": False}  # as templates that can do without reasoning call it
