"""Passkey retrieval (Mohtashami and Jaggi, NeurIPS 2023, arXiv 2305.16300): a number in repetitive text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from benchmarks.evaluation.tasks.retrieval import Retrieval

FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


class Passkey(Retrieval):
    """Retrieval from repetitive text, the easy case: nothing else in the context resembles the fact."""

    option = "passkey"

    def fact(self, key: int) -> str:
        return f"The pass key is {key}. Remember it. {key} is the pass key."

    def question(self) -> str:
        return " What is the pass key? The pass key is"

    def sentences(self, sample: int) -> Iterator[str]:
        return cycle(FILLER)
