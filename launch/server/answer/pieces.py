"""Pieces of an answer: of its content, its reasoning, or of a call of a tool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """The part of an answer to which a piece belongs."""

    content = "content"
    reasoning = "reasoning"
    call = "call"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: of a call, a piece of its arguments, which together are JSON text.
        number: of a call, its place among the answer's calls.
        identity, name: of a call, in its first piece.
    """

    kind: Kind
    text: str
    number: int = 0
    identity: str | None = None
    name: str | None = None


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces in as few as they can be."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if last is not None and (last.kind, last.number) == (piece.kind, piece.number):
            whole[-1] = replace(last, text=last.text + piece.text)
        else:
            whole.append(piece)
    return whole
