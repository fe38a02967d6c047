"""Rendering of a model's chat template, which is code that comes with the model: it may fail or never end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

LIMIT_S = 30.0
"""Time limit in seconds; templates of real models take about a millisecond."""
LONGEST_MARKUP = 2**20
"""Largest number of characters that a template may add to the messages."""
LONGEST_REPEATED = 8
"""Largest number of characters per character of a message: a template may escape or repeat them."""


class NeverEnds(ValueError):
    """The template exceeded the time limit. Other calls of it are not worth trying."""


def render(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """Text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: tokenizer of transformers.
        messages: role and content of each message.
        options: options of transformers' apply_chat_template.

    Raises:
        NeverEnds: the template does not end.
        ValueError: in one line, if the template fails or makes a text that is far too long.
    """
    import jinja2  # noqa: F401 (otherwise the first template's time would include this import)

    found: list[str | BaseException] = []

    def work() -> None:
        try:
            found.append(str(tokenizer.apply_chat_template(messages, tokenize=False, **options)))
        except (Exception, SystemExit) as error:  # the template raises anything, the main thread SystemExit, see below
            found.append(error)

    thread = threading.Thread(target=work, name="chat template", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if not found:
        # The thread gets this as an exception at its next step of Python, and a template consists of such steps.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise NeverEnds(f"it does not end within {LIMIT_S:g} s")
    if isinstance(found[0], BaseException):
        error = found[0]
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(reason) from error
    content = sum(len(message["content"]) for message in messages)
    if len(found[0]) > LONGEST_REPEATED * content + LONGEST_MARKUP:
        raise ValueError(f"it makes {len(found[0]):,} characters of {content:,}")
    return found[0]
