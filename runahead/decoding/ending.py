"""The text of a row, token by token, and where it ends.

The rank that decodes ends rows by it, and rank 0 has their text of it: from the same tokens both find the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from runahead.config import GenerationOptions
from runahead.decoding.stop_strings import StopStrings


class EndingText:
    """Text of one row.

    Args:
        tokenizer: the model's; None if it has none, and then the text is empty.
        eos_ids: the model's token ids that end a row.
        options: of the row.

    Attributes:
        ends: token ids that end it.
        num_tokens: tokens so far.

    Raises:
        ValueError: there are stop strings but no tokenizer.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: Collection[int], options: GenerationOptions) -> None:
        self._eos = frozenset(() if options.ignore_eos else eos_ids)
        self.ends = self._eos.union(options.stop_token_ids)
        self._options, self.num_tokens = options, 0
        self._text = StopStrings(
            tokenizer,
            options.stop,
            options.kept_tokens,
            shows_special=not options.skip_special_tokens,
            keeps_stop=options.include_stop,
        )

    def add(self, token: int) -> str | None:
        """Add the next token. Returns how the row ends with it: "eos", "stop", "length"; None if it goes on."""
        self.num_tokens += 1
        if token in self._eos:
            return "eos"
        if token in self.ends:
            if self._options.include_stop:
                self._text.add(token, may_stop=False)
            return "stop"
        if self._text.add(token, may_stop=self.num_tokens > self._options.min_new_tokens):
            return "stop"
        return "length" if self.num_tokens == self._options.max_new_tokens else None

    def finish(self) -> None:
        """End the text: what was held back becomes part of it."""
        self._text.finish()

    def take(self) -> str:
        """Text that was not taken before and that no later token can change."""
        return self._text.take()

    @property
    def text(self) -> str:
        """The text so far; after a stop string was found, the text before it, or with it if that is kept."""
        return self._text.text
