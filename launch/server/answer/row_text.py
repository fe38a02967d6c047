"""The text of each row of an answer and its parts, from its tokens, and how it ends."""

from __future__ import annotations

import json
from typing import Any

from launch.server.answer.logprobs import Scored
from launch.server.answer.parser import NO_PARTS, AnswerParser, Parts
from launch.server.answer.pieces import Kind, Piece, joined
from runahead.config import GenerationOptions
from runahead.decoding.scored_tokens import ScoredToken
from runahead.decoding.stop_strings import EndingText

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's word for how a row ended."""


class RowText:
    """Text of one row, from its tokens; it ends where the rank that decodes ends it, for the same reason.

    Args:
        tokenizer: the model's; None if it has none.
        eos_ids: token ids that end an answer.
        options: of the row.
        parts: what its text may consist of beside content.

    Attributes:
        finish_reason: "stop", "length", "tool_calls", or None while the row goes on.
        num_reasoning_tokens: tokens so far that are reasoning.
    """

    def __init__(
        self, tokenizer: Any | None, eos_ids: set[int], options: GenerationOptions, parts: Parts = NO_PARTS
    ) -> None:
        self._text = EndingText(tokenizer, eos_ids, options)
        self._is_json = options.json_schema is not None
        self._has_to_call = parts.calls is not None and parts.calls.is_certain
        self._parser, self._pieces = AnswerParser(parts), list[Piece]()
        self._scored: list[Scored] = []
        self.finish_reason: str | None = None
        self.num_reasoning_tokens = 0

    def add(self, token: int) -> list[Piece]:
        """Add a token, and return the pieces of the answer that are sure now."""
        if self.finish_reason is not None:
            return []
        if isinstance(token, ScoredToken):
            self._scored.append(Scored(token=int(token), logprobs=token.logprobs, offset=len(self._text.text)))
        ended = self._text.add(token)
        if ended is not None:
            self._text.finish()
        pieces = self._parser.add(self._text.take())
        self.num_reasoning_tokens += self._parser.in_reasoning
        if ended is not None:
            pieces = joined([*pieces, *self._parser.finish()])
        self._pieces += pieces
        if ended is not None:
            self.finish_reason = self._finish_reason(ended)
        return pieces

    def _finish_reason(self, ended: str) -> str:
        reason, calls = FINISHED[ended], self._parser
        if ended == "eos" and self._is_json and not _parses(self.content):
            return "length"  # the parser that leads it has come to a limit
        if ended == "eos" and self._has_to_call and (not calls.num_calls or calls.in_arguments):
            return "length"
        return "tool_calls" if reason == "stop" and calls.num_calls and not calls.in_arguments else reason

    @property
    def num_tokens(self) -> int:
        """New tokens so far."""
        return self._text.num_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that has ended it; None if none has."""
        return self._text.stop

    @property
    def pieces(self) -> list[Piece]:
        """The answer so far, in as few pieces as it can be."""
        return joined(self._pieces)

    @property
    def content(self) -> str:
        """The text beside reasoning and calls."""
        return "".join(piece.text for piece in self._pieces if piece.kind is Kind.content)

    def take_scored(self) -> list[Scored]:
        """Tokens with log-probabilities that were not taken before; none if the row did not ask for any."""
        taken, self._scored = self._scored, []
        return taken


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
