"""Parts of an answer's text: reasoning, content and calls of tools, found while the text comes."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from launch.server.answer.calls import MAX_NAME, CallForm, JSONEnd, arguments_of, calls_in
from launch.server.answer.pieces import Kind, Piece, joined

BEGIN_REASONING, END_REASONING = "<think>", "</think>"

HEAD = re.compile(r'[\[\]},\s]*\{"name": ?("(?:[^"\\]|\\.)*"), ?"arguments": ?(?=\{)')
"""Text between the arguments of one call and those of the next, where a grammar leads them."""
NAMED = re.compile(
    rf"\s*(?P<name>[^\s\[\]{{}}]{{1,{MAX_NAME}}})(?:\[CALL_ID\](?P<identity>[^\s\[\]{{}}]{{1,{MAX_NAME}}}))?\[ARGS\]\s*(?=\{{)"
)
"""Text before the arguments in Mistral's newer form."""
MOST_BETWEEN = 1024
"""Most characters before the JSON of a call, and most blanks that are held: all that is looked at again as more comes.
"""
MOST_WRONG = 16
"""Marks of calls that began none, after which an answer has no calls any more: each makes what follows be read anew."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that the text of an answer may have beside its content.

    Attributes:
        calls: form of calls of tools; None if there are none.
        known: names of the tools.
        at_most_one: of several calls only the first counts.
        reasons: the answer may begin with reasoning.
        in_reasoning: it begins inside of it, as the prompt has begun it.
    """

    calls: CallForm | None = None
    known: Collection[str] = ()
    at_most_one: bool = False
    reasons: bool = False
    in_reasoning: bool = False

    @property
    def tokens(self) -> list[str]:
        """Texts between parts, which may be special tokens."""
        around = [BEGIN_REASONING, END_REASONING] if self.reasons else []
        return [*around, *(self.calls.tokens if self.calls else ())]


NO_PARTS = Parts()
"""The parts of an answer that is all content."""


class Where(Enum):
    """In which part of an answer the next text is."""

    start = "start"
    reasoning = "reasoning"
    content = "content"
    call = "call"
    head = "head"
    arguments = "arguments"


class AnswerParser:
    """Parts of one answer.

    What pieces of the text are given makes no difference to the parts: text that may belong to two of them is held
    until more has come. Blanks between parts belong to none. What begins as a call and is none is
    content, and after `MOST_WRONG` of such all is.

        parser = AnswerParser(parts)
        pieces = [*parser.add("<think>So"), *parser.add("</think>Yes"), *parser.finish()]

    Args:
        parts: what there may be.

    Attributes:
        num_calls: calls so far.
        in_arguments: whether the arguments of the last one have no end so far.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._held = parts, ""
        self._calls, self._num_wrong = parts.calls, 0
        self._reasons = parts.reasons
        self._where = Where.start
        if parts.in_reasoning:
            self._where = Where.reasoning
        elif parts.calls is None and not parts.reasons:
            self._where = Where.content
        self._blanks = string.whitespace
        self._drops_blanks = parts.in_reasoning
        self._dropped = ""  # blanks before what may be a call
        self._json, self._scanned = JSONEnd(), 0
        self._value_end: int | None = None
        self._is_last = False
        self.num_calls, self.in_arguments = 0, False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._where is Where.reasoning

    def add(self, text: str) -> list[Piece]:
        """Take more of the text. Returns what is sure now."""
        self._held += text
        steps: dict[Where, Callable[[], list[Piece] | None]] = {
            Where.start: self._at_start,
            Where.reasoning: self._in_reasoning,
            Where.content: self._in_content,
            Where.call: self._in_call,
            Where.head: self._at_head,
            Where.arguments: self._in_arguments,
        }
        found: list[Piece] = []
        while (self._held or self._is_last) and (pieces := steps[self._where]()) is not None:
            found += pieces
        return joined(piece for piece in found if piece.text or piece.name is not None)

    def finish(self) -> list[Piece]:
        """The text has ended. Returns what was held."""
        self._is_last = True
        found = self.add("")
        if self._where is Where.head and not self.num_calls:  # the answer was cut off before the name of a tool
            found += self._say(Kind.content, self._held)
        return found

    # Each step takes what it can from the held text. It returns None if it needs more.

    def _at_start(self) -> list[Piece] | None:
        """Where reasoning may begin, or a call without a text before it."""
        begin, is_whole = self._begin_and_whole(0)
        rest = begin.lstrip(self._blanks)
        place = len(begin) - len(rest)
        if self._reasons and rest.startswith(BEGIN_REASONING):
            self._held, self._where = self._held[place + len(BEGIN_REASONING) :], Where.reasoning
            self._drops_blanks = True
            return []
        if not is_whole and (not rest or (self._reasons and BEGIN_REASONING.startswith(rest))):
            return None
        calls, self._reasons, self._where = self._calls, False, Where.content
        if calls is not None and calls.is_bare and rest.startswith(("{", "[")):
            self._begin_call(0, place)
            self._where = Where.head if calls.is_certain else Where.call
        elif self._is_last and not rest and self.num_calls:
            self._held = ""
        return []

    def _in_reasoning(self) -> list[Piece] | None:
        end = self._held.find(END_REASONING)
        if end < 0:
            return self._all_but(END_REASONING, Kind.reasoning)
        said = self._say(Kind.reasoning, _stripped(self._held[:end]))
        self._held = self._held[end + len(END_REASONING) :]
        self._where, self._reasons, self._drops_blanks = Where.start, False, True
        return said

    def _in_content(self) -> list[Piece] | None:
        calls = self._calls
        if calls is None or not calls.begin:
            said, self._held = self._say(Kind.content, self._held), ""
            return said or None
        begin = self._held.find(calls.begin)
        if begin < 0:
            return self._all_but(calls.begin, Kind.content)
        text = _stripped(self._held[:begin])
        said = self._say(Kind.content, text)
        self._begin_call(len(text), begin)
        return said

    def _in_call(self) -> list[Piece] | None:
        calls = self._calls
        assert calls is not None
        before, is_whole = self._begin_and_whole(0)
        start = len(calls.begin) if calls.begin and self._held.startswith(calls.begin) else 0
        identity, name = None, None
        if calls.others and (named := NAMED.match(before, start)) is not None:
            start, name, identity = named.end(), named["name"], named["identity"]
        rest = before[start:].lstrip()
        start = len(before) - len(rest)
        if not rest.startswith(("{", "[")):
            may_become = calls.others and not re.search(r"[\s{]", rest.rstrip())
            return None if not is_whole and (not rest or may_become) else self._no_call()
        if self._value_end is None:
            self._value_end = self._json.find(self._held, max(start, self._scanned))
            self._scanned = len(self._held)
        if self._value_end is None:
            return self._no_call() if self._is_last else None
        after, value = self._value_end, self._held[start : self._value_end]
        if calls.end:
            following, is_whole = self._begin_and_whole(after)
            rest = following.lstrip()
            if rest.startswith(calls.end):
                after += len(following) - len(rest) + len(calls.end)
            elif not is_whole and calls.end.startswith(rest):
                return None
            elif rest:
                return self._no_call()
        found: list[tuple[str, str]] | None
        if name is not None:
            arguments = arguments_of(value)
            found = None if arguments is None else [(name, arguments)]
        else:
            has_begin = bool(calls.begin) and self._held.startswith(calls.begin)
            found = calls_in(value, None if has_begin else self._parts.known)
        if found is None:
            return self._no_call()
        self._held, self._dropped, self._drops_blanks = self._held[after:], "", True
        self._where = Where.content
        if calls.is_bare:
            self._where, self._blanks = Where.start, string.whitespace + ";"
        return [piece for name, text in found for piece in self._call(name, text, identity)]

    def _at_head(self) -> list[Piece] | None:
        """Before the arguments of a call that a grammar led."""
        if (head := HEAD.match(self._held)) is None:
            return None
        self._held, self._where, self._json = self._held[head.end() :], Where.arguments, JSONEnd()
        self.in_arguments = True
        return self._call(json.loads(head[1]), "")

    def _in_arguments(self) -> list[Piece] | None:
        end = self._json.find(self._held, 0)
        text, self._held = self._held[:end], "" if end is None else self._held[end:]
        if end is not None:
            self._where, self.in_arguments = Where.head, False
        return [Piece(kind=Kind.call, text=text, number=self.num_calls - 1)] if text else None

    # What steps share.

    def _begin_and_whole(self, start: int) -> tuple[str, bool]:
        """What is held from `start` on, as far as one looks at it more than once, and whether it gets no longer."""
        text = self._held[start : start + MOST_BETWEEN]
        return text, self._is_last or len(text) == MOST_BETWEEN

    def _all_but(self, mark: str, kind: Kind) -> list[Piece] | None:
        """The held text but for what may be the beginning of a mark, and blanks before that."""
        if self._is_last:
            text = self._held = _stripped(self._held) if self.num_calls else self._held
        else:
            text = _stripped(self._held[: len(self._held) - _num_begun(self._held, mark)])
        self._held = self._held[len(text) :]
        return self._say(kind, text) or None

    def _say(self, kind: Kind, text: str) -> list[Piece]:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        return [Piece(kind=kind, text=text)] if text else []

    def _begin_call(self, drop_from: int, place: int) -> None:
        """What is held from this place on may be a call; if it is, what is held before it is dropped."""
        self._dropped, self._held = self._held[drop_from:place], self._held[place:]
        self._where, self._json, self._scanned, self._value_end = Where.call, JSONEnd(), 0, None

    def _no_call(self) -> list[Piece]:
        """What began as a call is content, at least as far as what it began with."""
        calls = self._calls
        assert calls is not None
        length = len(calls.begin) if calls.begin and self._held.startswith(calls.begin) else 1
        text, self._held = self._dropped + self._held[:length], self._held[length:]
        self._dropped, self._where = "", Where.content
        self._num_wrong += 1
        if self._num_wrong == MOST_WRONG:
            self._calls = None
        return self._say(Kind.content, text)

    def _call(self, name: str, text: str, identity: str | None = None) -> list[Piece]:
        if self._parts.at_most_one and self.num_calls:
            return []
        number, self.num_calls = self.num_calls, self.num_calls + 1
        return [Piece(kind=Kind.call, text=text, number=number, identity=identity or new_identity(), name=name)]


def new_identity() -> str:
    """Name of a call: nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _num_begun(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    return next((length for length in range(len(mark) - 1, 0, -1) if text.endswith(mark[:length])), 0)


def _stripped(text: str) -> str:
    """A text without the blanks at its end, of which at most `MOST_BETWEEN` are taken away."""
    return max(text.rstrip(), text[:-MOST_BETWEEN], key=len)
