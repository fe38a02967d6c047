"""Answers on standard output, which gets nothing else, so that it can be piped, or in a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from runahead.config import GenerationOptions
from runahead.decoding.stop_strings import EndingText
from runahead.report import Generation


class AnswerWriter:
    """Writes answers to a file descriptor as soon as they are complete.

    It is not an error if the reader closes the pipe (`| head -1`).

    Args:
        skipped: for each prompt without an answer, by index, what is wrong with it.
        name: of what the descriptor writes to, for messages.
        done: prompts whose lines are there already.
        more: further fields of the line of an answer, by its index.
    """

    def __init__(
        self,
        descriptor: int = 1,
        skipped: Mapping[int, str] | None = None,
        *,
        name: str = "standard output",
        done: Collection[int] = (),
        more: Callable[[int], Mapping[str, Any]] = lambda index: {},
    ) -> None:
        self._descriptor, self._name = descriptor, name
        self._is_read = True
        self._done, self._more = done, more
        self._skipped = {index: wrong for index, wrong in sorted((skipped or {}).items()) if index not in done}

    def write(self, text: str) -> None:
        data = text.encode()
        while data and self._is_read:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                # The other ranks are in the middle of a token, so the run continues and writes its report.
                self._is_read = False
            except OSError as error:
                error.filename = self._name
                raise

    def write_line(self, index: int, generation: Generation) -> None:
        """Write the answer to one of several prompts as a line of JSON, after those of skipped prompts before it.

        Nothing is written twice.
        """
        if index in self._done:
            return
        self.write_skipped(before=index)
        entry = {
            "index": index,
            "text": generation.text,
            "new_token_ids": generation.new_token_ids,
            "finish_reason": generation.finish_reason,
            "prompt_tokens": generation.prompt_tokens,
            **self._more(index),
        }
        self.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def write_skipped(self, before: float = math.inf) -> None:
        """Write a line of JSON for each skipped prompt with a lower index."""
        for index in [index for index in self._skipped if index < before]:
            self.write(json.dumps({"index": index, "error": self._skipped.pop(index)}) + "\n")

    def finish(self) -> None:
        """Write the lines of the skipped prompts that are left, and close what is not standard output."""
        self.write_skipped()
        if self._descriptor != 1:
            os.close(self._descriptor)


class AnswerStream:
    """Writes the answer to a single prompt while it is generated.

    Text that may be the beginning of a stop string, or is an incomplete character, is held back until more tokens
    arrive. Tokens in `eos_ids` end the text and are not part of it.
    """

    def __init__(
        self, answers: AnswerWriter, tokenizer: Any | None, options: GenerationOptions, *, eos_ids: set[int]
    ) -> None:
        self._answers = answers
        self._row = EndingText(tokenizer, eos_ids, options)

    def on_tokens(self, token_ids: list[int | None]) -> None:
        """Take the token of one decoding step; None if there is none."""
        [token_id] = token_ids
        if token_id is not None:
            self._row.add(token_id)
            self._answers.write(self._row.take())

    def finish(self) -> None:
        self._row.finish()
        self._answers.write(self._row.take() + "\n")
