"""A model's chat template at work. It comes with the model and may be anything: it may fail, and it may never end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

LIMIT_S = 30.0
"""Seconds; templates of models take a thousandth of one."""
LONGEST_MARKUP = 2**20
"""Characters that a template may add, where it does not repeat the messages."""
LONGEST_REPEATED = 8
"""Characters that it may make of one of theirs: it may quote them, and have them twice."""


class NeverEnds(ValueError):
    """A template was given up; to try others of its kind would take as long again."""


def render(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """The text that a tokenizer's template makes of messages.

    Args:
        options: of transformers' apply_chat_template.

    Raises:
        NeverEnds: it does not end.
        ValueError: it fails, or makes a text that is far too long; one line.
    """
    import jinja2  # noqa: F401 (transformers imports it with the first template, which is not the template's time)

    found: list[str | BaseException] = []

    def work() -> None:
        try:
            found.append(str(tokenizer.apply_chat_template(messages, tokenize=False, **options)))
        except Exception as error:  # whatever a model's own template raises
            found.append(error)
        except SystemExit as error:  # or it was given up, see below
            found.append(error)

    thread = threading.Thread(target=work, name="chat template", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if not found:
        # Between two steps of Python, which a template is made of, the thread gets this as an exception.
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
