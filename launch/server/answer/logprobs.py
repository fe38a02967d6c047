"""Log-probabilities in OpenAI's form, with the text of each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runahead.decoding.stop_strings import REPLACEMENT, Detokenizer
from runahead.report import TokenLogprobs

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}
"""Byte of each character in the vocabulary of a byte-level tokenizer (GPT-2's table)."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A new token with its log-probabilities.

    Attributes:
        offset: number of characters of the answer that were complete before it.
    """

    token: int
    logprobs: TokenLogprobs
    offset: int


class TokenTexts:
    """Text of single tokens.

    Args:
        tokenizer: the model's; None if it has none.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text_and_bytes(self, token: int) -> tuple[str, list[int] | None]:
        """Text of a token and its bytes in UTF-8; None if they are not known.

        A token that is a part of a character has replacement characters for text, and its own bytes.
        """
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def parts(self, ids: Sequence[int], given: str | None = None) -> list[str]:
        """The text that each of some tokens adds.

        Args:
            given: the text that they were made of, which may name special tokens; None: the text has none of these.
        """
        if self._tokenizer is None:
            return [""] * len(ids)
        named = [] if given is None else [name for name in self._tokenizer.get_added_vocab() if name in given]
        text = Detokenizer(self._tokenizer, named)
        parts = [text.add(token) for token in ids]
        parts[-1] += text.finish()
        if "".join(parts[1:]) == given:  # the tokenizer has begun with a token that the text names later
            parts[0] = ""
        return parts

    def _look_up(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        # Decoders may drop the blank before a text's first token, so that of the second one is taken.
        once, twice = (self._decode([token] * count) for count in (1, 2))
        text = twice[len(once) :]
        if REPLACEMENT not in text:
            return text, list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        data = None
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            data = [int(found[1], 16)]
        elif all(character in BYTE_OF for character in piece):
            data = [BYTE_OF[character] for character in piece]
        return (text if data is None else bytes(data).decode(errors="replace")), data

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def chat_logprobs(scored: Sequence[Scored], texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def about(token: int, logprob: float) -> dict[str, Any]:
        text, data = texts.text_and_bytes(token)
        return {"token": text, "bytes": data, "logprob": logprob}

    content = [
        {
            **about(each.token, each.logprobs.logprob),
            "top_logprobs": [about(token, logprob) for token, logprob in each.logprobs.top],
        }
        for each in scored
    ]
    return {"content": content, "refusal": None}


def text_logprobs(scored: Sequence[Scored], texts: TokenTexts) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions. `top_logprobs` has the new token, too, though it be less likely."""
    top = []
    for each in scored:
        by_text: dict[str, float] = {}
        for token, logprob in [*each.logprobs.top, (each.token, each.logprobs.logprob)]:
            by_text.setdefault(texts.text_and_bytes(token)[0], logprob)  # of tokens with one text, the most likely
        top.append(by_text)
    return {
        "tokens": [texts.text_and_bytes(each.token)[0] for each in scored],
        "token_logprobs": [each.logprobs.logprob for each in scored],
        "top_logprobs": top,
        "text_offset": [each.offset for each in scored],
    }
