"""Form of an API's answers: an object of the whole answer, or the events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from launch.server.answer.listener import RequestListener
from launch.server.answer.logprobs import Scored
from launch.server.answer.pieces import Piece
from launch.server.answer.row_text import RowText
from launch.server.answer.usage import Usage
from launch.server.errors import APIError, dumps
from runahead.serving.request import Request

Event = dict[str, Any]


class Form(ABC):
    """Writes one answer. Of a stream every row begins, has pieces and ends, in the order of its tokens.

    Attributes:
        ending: bytes after the last event of a stream that has not failed.
    """

    ending = b""

    @abstractmethod
    def whole(self, rows: Sequence[RowText], usage: Usage) -> Event:
        """The answer of a request that does not stream."""

    def finished(
        self, answer: Event, prompts: Sequence[Sequence[int]], queued: Request, listener: RequestListener
    ) -> Event:
        """A whole answer, with each prompt before its answers, or where its prompt is handed over, if that was asked.

        Args:
            prompts: token ids of each row.
        """
        return answer

    def opened(self) -> list[Event]:
        """Events before anything is computed."""
        return []

    def progress(self, *, total: int, cache: int, processed: int, time_ms: int) -> list[Event]:
        """Events that tell how far the prefill is.

        Args:
            total: tokens of the prompts.
            cache: of these, those that need not be computed, as their keys and values are stored.
            processed: those that are computed or stored.
            time_ms: since the prefill began.
        """
        return []

    @abstractmethod
    def begin(self, index: int, usage: Usage) -> list[Event]:
        """Events before the pieces of a row, which has its first token."""

    @abstractmethod
    def piece(self, index: int, piece: Piece, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        """Events for a piece of a row, with the log-probabilities of the tokens since the piece before."""

    @abstractmethod
    def end(self, index: int, row: RowText, scored: Sequence[Scored], usage: Usage) -> list[Event]:
        """Events for the end of a row, with the log-probabilities of tokens that have no text."""

    @abstractmethod
    def closed(self, usage: Usage) -> list[Event]:
        """Events after all rows."""

    @abstractmethod
    def failed(self, error: APIError) -> list[Event]:
        """Events of a stream that ends with an error."""

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        """An event as it is sent."""
        return b"data: " + dumps(event) + b"\n\n"


class NamedForm(Form):
    """A form whose events have the name that their `type` says."""

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + super().encoded(event)
