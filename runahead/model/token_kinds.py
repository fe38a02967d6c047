"""The kind of every token of a vocabulary: special, punctuation, or any other."""

# Legend: V vocabulary.

from __future__ import annotations

import string
from typing import Any

import torch
from torch import Tensor

from policies.layer_view import TokenKind


def token_kinds(tokenizer: Any, vocab_size: int) -> Tensor:
    """Kinds (V) as int8, of `policies.layer_view.TokenKind`. Without a tokenizer all tokens are others.

    Punctuation is what has nothing but ASCII punctuation marks, and spaces around them.
    """
    kinds_V = torch.full((vocab_size,), TokenKind.other.value, dtype=torch.int8)
    if tokenizer is None:
        return kinds_V
    known = min(vocab_size, len(tokenizer))
    marks = frozenset(string.punctuation)
    for token, text in enumerate(tokenizer.batch_decode([[token] for token in range(known)])):
        if text.strip() and marks.issuperset(text.strip()):
            kinds_V[token] = TokenKind.punctuation.value
    for token in tokenizer.all_special_ids:
        if token < vocab_size:
            kinds_V[token] = TokenKind.special.value
    return kinds_V
