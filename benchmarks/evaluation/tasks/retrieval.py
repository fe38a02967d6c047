"""Retrieval of one fact from a long context: passkey, in repetitive text, and needle, in the user's text."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Iterator
from itertools import cycle, product
from typing import ClassVar

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import FOUND
from benchmarks.evaluation.options import EvaluateRun, RetrievalOptions
from benchmarks.evaluation.tasks.answering import AnswerTask, Item
from benchmarks.evaluation.tasks.base import COST_OF_NEW, Case

KEY_DIGITS = 5
FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
SENTENCES_APART = 20
"""Distance between the starts of two samples' texts, in sentences."""


class NumberRetrieval(AnswerTask):
    """Share of answers that begin with the number given in the context.

    Attributes:
        option: name of the section with the task's options.
        fact: text that states the key, which takes the place of {key}.
        asked: the question, which ends where the answer begins.
    """

    metric = FOUND
    option: ClassVar[str]
    fact: ClassVar[str]
    asked: ClassVar[str]

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options: RetrievalOptions = getattr(run, self.option)
        self.material, self.question = material, self._options.question
        samples, lengths = self._options.samples, self._options.lengths
        self.cases = [
            {"length": length, "depth": depth, "sample": sample}
            for sample, length, depth in product(range(samples), lengths, self._options.depths)
        ]
        self.settings = {"question": self.question.name, "new_tokens": self._options.new_tokens}
        longest = max(lengths)
        material.require_positions(f"{self.option}.lengths={longest}", longest + self._options.new_tokens)
        for length in (min(lengths), longest):  # raises if one is too short or too long
            self.item({"length": length, "depth": 0.0, "sample": samples - 1})

    @abstractmethod
    def sentences(self, sample: int) -> Iterator[str]:
        """The sentences around the fact."""

    def cost(self, case: Case) -> float:
        return case["length"] + COST_OF_NEW * self._options.new_tokens

    def score(self, answer: str, item: Item) -> float:
        return float(number_in(answer) == item.answers[0])

    def item(self, case: Case) -> Item:
        """Build context, question and key of a case.

        Raises:
            ValueError: there is no room for them, or too little text.
        """
        length, depth, sample = case["length"], case["depth"], case["sample"]
        draw = random.Random(f"{self.option} {length} {depth} {sample}")
        key = draw.randrange(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS)
        ids, prefix = self.material.ids, self.material.prefix
        fact, question = ids(" " + self.fact.format(key=key)), ids(self.asked)
        room = length - len(prefix) - len(fact) - len(question)
        before: list[list[int]] = []
        for sentence in self.sentences(sample):
            more = ids(" " + sentence)
            if len(more) > room:
                break
            before.append(more)
            room -= len(more)
        else:
            assert self.material.text is not None, "only a user's text ends"
            raise ValueError(
                f"{self.material.text.name} is too short for {self.option}.lengths={length}; give a longer text.file "
                "or a smaller length"
            )
        if not before:
            raise ValueError(
                f"{self.option}.lengths={length} has no room for fact, question and other text; use more tokens"
            )
        place = round(depth * len(before))
        context = [token for part in (prefix, *before[:place], fact, *before[place:]) for token in part]
        return Item(
            context=context,
            question=question,
            answers=[str(key)],
            reference=f" {key}.",
            new_tokens=self._options.new_tokens,
            details={"key": key},
        )


class Passkey(NumberRetrieval):
    """Passkey retrieval (Mohtashami and Jaggi, NeurIPS 2023, arXiv 2305.16300): a number in repetitive text.

    This is the easy case: nothing else in the context resembles the fact.
    """

    option = "passkey"
    fact = "The pass key is {key}. Remember it. {key} is the pass key."
    asked = " What is the pass key? The pass key is"

    def sentences(self, sample: int) -> Iterator[str]:
        return cycle(FILLER)


class Needle(NumberRetrieval):
    """Needle in a haystack (Kamradt, 2023): a sentence unrelated to the user's text, which competes for attention."""

    option = "needle"
    needs_text = True
    fact = "The registration number of the old lighthouse is {key}."
    asked = "\n\nQuestion: What is the registration number of the old lighthouse?\nAnswer: The registration number is"

    def sentences(self, sample: int) -> Iterator[str]:
        return iter(self.material.sentences[sample * SENTENCES_APART :])


def number_in(answer: str) -> str | None:
    """The digits of the first number in an answer, or None."""
    found = re.search(r"\d+", answer)
    return None if found is None else found[0]
