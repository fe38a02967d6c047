"""Tokens of texts and messages, made piece by piece by a model's tokenizer and chat template.

A chat template is code that comes with the model: it may fail or never end.
"""

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
MARK = "\N{SNOWMAN}content\N{SNOWMAN}"
BEFORE = ((), ("system",), ("user", "assistant"), ("user",), ("system", "user", "assistant"), ("system", "user"))
"""Roles of earlier messages to try before another message, since templates refuse some orders."""


class NeverEnds(ValueError):
    """The template exceeded the time limit. Other calls of it are not worth trying."""


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: tokenizer of transformers.
        messages: role, content and whatever else the template reads of each message.
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
    content = sum(len(str(given)) for given in (*messages, *options.get("tools", ())))
    if len(found[0]) > LONGEST_REPEATED * content + LONGEST_MARKUP:
        raise ValueError(f"it makes {len(found[0]):,} characters of {content:,}")
    return found[0]


class ModelText:
    """Tokenizer and chat template of a model. Each piece is tokenized separately, independent of its neighbours.

    Args:
        tokenizer: tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: dict[tuple[str, bool], tuple[list[int], list[int]]] = {}

    def ids(self, text: str) -> list[int]:
        # verbose=False: the length is checked when positions are known.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    @property
    def front(self) -> list[int]:
        """Tokens that the tokenizer puts before every text, such as a beginning-of-text token."""
        with_special = list(self._tokenizer("a", verbose=False)["input_ids"])
        without = self.ids("a")
        for start in range(len(with_special) - len(without) + 1):
            if with_special[start : start + len(without)] == without:
                return with_special[:start]
        return []

    @property
    def placeholder(self) -> int:
        """Token that stands for an argument: <unk>, or a blank if the model has no such token."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return int(unknown) if unknown is not None else self.ids(" ")[0]

    def message(self, role: str, *, first: bool) -> tuple[list[int], list[int]]:
        """Tokens before and after the text of a message.

        Args:
            role: role of the message.
            first: whether it is the first message of the chat.

        Raises:
            ValueError: the model has no chat template, or one that does not take this message.
        """
        if (role, first) not in self._messages:
            before, after = self._markup(role, first)
            self._messages[role, first] = self.ids(before), self.ids(after)
        return self._messages[role, first]

    def answer(self) -> list[int]:
        """Tokens after a user's message that ask the model for its answer. Raises: ValueError."""
        for context in BEFORE:
            rendered = self._render([*context, "user"])
            asking = self._render([*context, "user"], add_generation_prompt=True)
            if rendered is not None and asking is not None and asking.startswith(rendered):
                return self.ids(asking[len(rendered) :])
        raise ValueError("the model's chat template cannot ask for an answer; write its markup as text")

    def _markup(self, role: str, first: bool) -> tuple[str, str]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("needs a chat template, and the model's tokenizer has none; write the markup as text")
        for context in BEFORE[:1] if first else BEFORE[1:]:
            before, whole = self._render(context), self._render([*context, role])
            if before is None or whole is None or not whole.startswith(before):
                continue
            parts = whole[len(before) :].split(MARK)
            if len(parts) == 2:
                return parts[0], parts[1]
        where = "as the first message" if first else "after other messages"
        raise ValueError(f"is not possible {where} in the model's chat template; write its markup as text")

    def _render(self, roles: Sequence[str], **options: Any) -> str | None:
        """Text of a chat with messages of these roles, or None if the template refuses it."""
        if not roles:
            return ""
        messages = [{"role": role, "content": MARK} for role in roles]
        try:
            return render(self._tokenizer, messages, **options)
        except NeverEnds:
            raise
        except ValueError:
            return None
