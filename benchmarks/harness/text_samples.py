"""Prompts of measurements as token ids: random ones, and samples of a text for studies of quality."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import torch

from benchmarks.harness.machine import ROOT
from runahead.model.model import Model

EXAMPLE = str(ROOT / "examples" / "frankenstein_letters.txt")


def random_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def text_ids(model: Model, path: str) -> list[int]:
    """Token ids of a text file in UTF-8, optionally compressed by gzip."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        ids: list[int] = model.tokenizer(file.read(), verbose=False).input_ids
    return ids


def repeated(ids: list[int], length: int) -> list[int]:
    """The first `length` tokens of a text that is repeated as often as needed."""
    return (ids * (length // len(ids) + 1))[:length]


def samples(ids: list[int], number: int, length: int, *, option: str) -> Iterator[tuple[int, list[int]]]:
    """Samples of `length` tokens, spread evenly over the text, each with the position of its first token.

    Args:
        option: the text's option and value on the command line, for the message.

    Raises:
        SystemExit: the text is too short.
    """
    if len(ids) < number * length:
        raise SystemExit(
            f"{option} has {len(ids)} tokens, but {number} samples of {length} need {number * length}; use a longer "
            "text, or fewer or shorter samples"
        )
    apart = len(ids) // number
    for start in range(0, number * apart, apart):
        yield start, ids[start : start + length]
