"""Text of one row while it is generated: detokenization token by token, and stop strings.

The rank that decodes uses it to know when to stop, and rank 0 to know what to print: from the same token ids both get
the same text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from runahead.config import GenerationOptions

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) UTF-8

# A character has at most 4 bytes, and a token at least one. Text that is still incomplete after more tokens is invalid,
# except for a character that may just have begun: up to three bytes, each shown as one replacement character.
MAX_TOKENS_OF_A_CHARACTER = 4
# Bounds the work on long invalid UTF-8, such as that of an untrained model; such text may lose a character here.
MAX_PENDING_TOKENS = 32


class Detokenizer:
    """Incremental detokenizer: turns token ids, one by one, into parts of the text that do not change any more.

    Tokenizers treat the start of a text specially (SentencePiece drops its first space), so a token is decoded together
    with the tokens of the part before it, and only the text that it adds is returned.

    Args:
        tokenizer: the model's.
        kept: names of special tokens that the text has; others are left out of it.
        shows_special: it has all of them.
    """

    def __init__(self, tokenizer: Any, kept: Sequence[str] = (), *, shows_special: bool = False):
        self._tokenizer, self._skips = tokenizer, not shows_special
        self._kept = _kept_tokens(tokenizer, kept) if kept else {}
        self._window: list[int] = []  # the tokens of the last complete part, then the pending ones
        self._num_context = 0  # number of the window's tokens that belong to the last complete part
        self._num_chars = 0  # number of characters of the window's text that were returned

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that it completes: "" while a character still lacks bytes."""
        if token_id in self._kept:
            before = self.finish()
            self._window, self._num_context, self._num_chars = [], 0, 0
            return before + self._kept[token_id]
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        num_complete = len(text.rstrip(REPLACEMENT))
        if num_pending > MAX_TOKENS_OF_A_CHARACTER:
            num_complete = max(num_complete, len(text) - (MAX_TOKENS_OF_A_CHARACTER - 1))
        if num_pending > MAX_PENDING_TOKENS:
            num_complete = len(text)
        return self._hand_out(text[:num_complete], is_whole_window=num_complete == len(text))

    def finish(self) -> str:
        """Return the rest of the text; incomplete characters become replacement characters."""
        return self._hand_out(self._decode(self._window), is_whole_window=True)

    def _hand_out(self, complete: str, *, is_whole_window: bool) -> str:
        part = complete[self._num_chars :]
        self._num_chars = max(self._num_chars, len(complete))
        if part and is_whole_window:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_chars = len(self._decode(self._window))
        return part

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up would remove spaces that were returned already ("do n" + "'t" -> "don't").
        how = {"skip_special_tokens": self._skips, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(token_ids, **how))


class StopStrings:
    """Text of one row so far, which ends before the stop string that was complete first.

    "Complete first" makes the result independent of how the text is split into tokens; of two stop strings that end at
    the same character, the longer one counts. A stop string that is the name of a special token ("<|im_end|>"), which
    text does not contain, stops at that token. Without a tokenizer the text is empty.

        row = StopStrings(tokenizer, ["\\n\\n"])
        while not row.add(next_token()):
            print(row.take(), end="")   # no part of a stop string, no incomplete character
        row.finish()
        print(row.take())               # now all of row.text has been taken

    Args:
        tokenizer: the model's tokenizer, or None.
        stop: the stop strings.
        kept: names of special tokens that the text has.
        shows_special: it has all of them.
        keeps_stop: it has the stop string, too, at which it ends.

    Attributes:
        text: the text so far; after a stop string was found, the text before it, or with `keeps_stop` up to its end.
        found: the stop string that was found; None so far.

    Raises:
        ValueError: there are stop strings but no tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop: Sequence[str] = (),
        kept: Sequence[str] = (),
        *,
        shows_special: bool = False,
        keeps_stop: bool = False,
    ):
        if stop and tokenizer is None:
            raise ValueError(f"generation.stop={list(stop)} needs a tokenizer, and this model has none; leave it out")
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, kept, shows_special=shows_special)
        self._stop, self._keeps_stop = list(stop), keeps_stop
        self._stop_ids = _special_token_ids(tokenizer, self._stop) if self._stop else {}
        self.text = ""
        self._num_taken = 0
        self.stopped = False
        self.found: str | None = None
        self.finished = False

    def add(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add the next token, and return whether a stop string is complete. Later tokens are ignored then.

        Args:
            may_stop: a stop string that is complete with this token counts.
        """
        if self._detokenizer is None or self.stopped or self.finished:
            return self.stopped
        if may_stop and token_id in self._stop_ids:
            self._append(self._detokenizer.finish())
            if not self.stopped:
                self.found = self._stop_ids[token_id]
                self.text += self.found if self._keeps_stop else ""
            self.stopped = True
        else:
            self._append(self._detokenizer.add(token_id), may_stop=may_stop)
        return self.stopped

    def finish(self) -> None:
        """End the text: what was held back becomes part of it."""
        if self._detokenizer is not None and not self.stopped and not self.finished:
            self._append(self._detokenizer.finish())
        self.finished = True

    def take(self) -> str:
        """Return the text that was not taken before and that no later token can change."""
        end = len(self.text)
        if not (self.stopped or self.finished):
            end -= self._num_chars_of_a_begun_stop_string()
        part = self.text[self._num_taken : end]
        self._num_taken += len(part)
        return part

    def _append(self, part: str, *, may_stop: bool = True) -> None:
        old_length = len(self.text)
        self.text += part
        if not may_stop:
            return
        found = []
        for stop in self._stop:
            # A stop string may begin in the old text, but it ends in the new part.
            start = self.text.find(stop, max(0, old_length - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            self.stopped = True
            end, start, self.found = min(found)
            self.text = self.text[: end if self._keeps_stop else start]

    def _num_chars_of_a_begun_stop_string(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            end_of_text = self.text[-length:]
            if any(len(stop) > length and stop.startswith(end_of_text) for stop in self._stop):
                return length
        return 0


class EndingText:
    """Text of one row, token by token, and where the row ends: with a stop string, a token, or its length.

    The rank that decodes ends rows by it, and rank 0 has their text of it.

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

    @property
    def stop(self) -> str | None:
        """The stop string that has ended it; None if none has."""
        return self._text.found


def _kept_tokens(tokenizer: Any, names: Sequence[str]) -> dict[int, str]:
    """Name of each of these tokens that decoding would leave out, by its id."""
    ids = tokenizer.get_added_vocab()
    found = {ids[name]: name for name in names if name in ids}
    return {token: name for token, name in found.items() if not tokenizer.decode([token], skip_special_tokens=True)}


def _special_token_ids(tokenizer: Any, names: list[str]) -> dict[int, str]:
    """Name of each of these that are special tokens, by its id."""
    id_of_name = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {id_of_name[name]: name for name in names if name in id_of_name}
