"""Needle in a haystack (Kamradt, 2023): a sentence unrelated to the text around it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.evaluation.tasks.retrieval import Retrieval

SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")
SENTENCES_APART = 20
"""Distance between the starts of two samples' texts, in sentences."""


class Needle(Retrieval):
    """Retrieval from the user's text, which competes with the fact for attention."""

    option = "needle"
    needs_text = True

    def fact(self, key: int) -> str:
        return f"The registration number of the old lighthouse is {key}."

    def question(self) -> str:
        return (
            "\n\nQuestion: What is the registration number of the old lighthouse?\nAnswer: The registration number is"
        )

    def sentences(self, sample: int) -> Iterator[str]:
        assert self._material.text is not None
        found = SENTENCE_ENDS.split(self._material.text.content.strip())
        return iter([" ".join(sentence.split()) for sentence in found[sample * SENTENCES_APART :]])
