"""The text of each row of an answer, from its tokens, and how it ends."""

from __future__ import annotations

import json
from typing import Any

from launch.server.answer.logprobs import Scored
from runahead.config import GenerationOptions
from runahead.decoding.scored_tokens import ScoredToken
from runahead.decoding.stop_strings import StopStrings

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's word for how a row ended."""


class RowText:
    """Text of one row, from its tokens; it ends where the rank that decodes ends it, for the same reason.

    Attributes:
        num_tokens: new tokens so far.
        finish_reason: "stop", "length", or None while the row goes on.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: set[int], options: GenerationOptions) -> None:
        self._text = StopStrings(tokenizer, options.stop)
        self._eos_ids = set() if options.ignore_eos else eos_ids
        self._max_new_tokens = options.max_new_tokens
        self._is_json = options.json_schema is not None
        self._scored: list[Scored] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add(self, token: int) -> str:
        """Add a token, and return the text that is sure now."""
        if self.finish_reason is not None:
            return ""
        self.num_tokens += 1
        if isinstance(token, ScoredToken):
            self._scored.append(Scored(token=int(token), logprobs=token.logprobs, offset=len(self._text.text)))
        ended = None
        if token in self._eos_ids:
            ended = "eos"
        elif self._text.add(token):
            ended = "stop"
        elif self.num_tokens == self._max_new_tokens:
            ended = "length"
        if ended is not None:
            self._text.finish()
            self.finish_reason = FINISHED[ended]
            if ended == "eos" and self._is_json and not _parses(self._text.text):
                self.finish_reason = "length"  # the parser that leads it has come to a limit
        return self._text.take()

    def take_scored(self) -> list[Scored]:
        """Tokens with log-probabilities that were not taken before; none if the row did not ask for any."""
        taken, self._scored = self._scored, []
        return taken

    @property
    def text(self) -> str:
        return self._text.text


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
