"""Base of passkey and needle: one fact in a long context, and a question about it."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.options import EvaluateRun, Question, RetrievalOptions
from benchmarks.evaluation.tasks.base import (
    COST_OF_NEW,
    Case,
    KVUse,
    Outcome,
    Runtime,
    Task,
    feed_timed,
    tpot_s,
)
from runahead.config import GenerationOptions
from runahead.conversation import Conversation

KEY_DIGITS = 5


class Retrieval(Task):
    """Share of answers that begin with the number given in the context.

    The question is a separate turn: the policy has thinned the context before, without knowing the question. With
    question=with_context the question is the end of the context, as in most publications; policies then keep what the
    question asks for.
    """

    metric = "found"
    option: str
    """Name of the section with the task's options."""

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options: RetrievalOptions = getattr(run, self.option)
        self._material = material
        longest = max(self._options.lengths)
        material.require_positions(f"{self.option}.lengths={longest}", longest + self._options.new_tokens)
        for length in (min(self._options.lengths), longest):  # raises if one is too short or too long
            self._made({"length": length, "depth": 0.0, "sample": self._options.samples - 1})

    @abstractmethod
    def fact(self, key: int) -> str:
        """A sentence that states the key."""

    @abstractmethod
    def question(self) -> str:
        """The question, which ends where the answer begins."""

    @abstractmethod
    def sentences(self, sample: int) -> Iterator[str]:
        """The sentences around the fact."""

    @property
    def cases(self) -> list[Case]:
        options = self._options
        return [
            {"length": length, "depth": depth, "sample": sample}
            for sample, length, depth in product(range(options.samples), options.lengths, options.depths)
        ]

    @property
    def settings(self) -> dict[str, Any]:
        return {"question": self._options.question.name, "new_tokens": self._options.new_tokens}

    def cost(self, case: Case) -> float:
        return case["length"] + COST_OF_NEW * self._options.new_tokens

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        context, question, key = self._made(case)
        conversation = Conversation(runtime.model, contender.policies, length=len(context) + len(question))
        if self._options.question is Question.separate:
            context_s = feed_timed(conversation, context)
            kv = KVUse.of(conversation)
            question_s = feed_timed(conversation, question, cut_back=False)  # the question must not affect what is kept
        else:
            context_s, question_s = feed_timed(conversation, context + question), 0.0
            kv = KVUse.of(conversation)
        decoded = conversation.generate(GenerationOptions(max_new_tokens=self._options.new_tokens))
        answer = self._material.tokenizer.decode(decoded.rows[0].new_ids, skip_special_tokens=True)
        return Outcome(
            score=float(number_in(answer) == str(key)),
            kv=kv,
            ttft_s=context_s + question_s,
            tpot_s=tpot_s(decoded),
            details={"key": key, "answer": answer, "question_s": question_s},
        )

    def _made(self, case: Case) -> tuple[list[int], list[int], int]:
        """Build context, question and key of a case.

        Raises:
            ValueError: there is no room for them, or too little text.
        """
        length, depth, sample = case["length"], case["depth"], case["sample"]
        draw = random.Random(f"{self.option} {length} {depth} {sample}")
        key = draw.randrange(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS)
        ids, prefix = self._material.ids, self._material.prefix
        fact, question = ids(" " + self.fact(key)), ids(self.question())
        room = length - len(prefix) - len(fact) - len(question)
        before: list[list[int]] = []
        for sentence in self.sentences(sample):
            more = ids(" " + sentence)
            if len(more) > room:
                break
            before.append(more)
            room -= len(more)
        else:
            raise ValueError(
                f"{self._text_name()} is too short for {self.option}.lengths={length}; give a longer text.file or a "
                "smaller length"
            )
        if not before:
            raise ValueError(
                f"{self.option}.lengths={length} has no room for fact, question and other text; use more tokens"
            )
        place = round(depth * len(before))
        context = [token for part in (prefix, *before[:place], fact, *before[place:]) for token in part]
        return context, question, key

    def _text_name(self) -> str:
        assert self._material.text is not None, "only a user's text ends"
        return self._material.text.name


def number_in(answer: str) -> str | None:
    """The digits of the first number in an answer, or None."""
    found = re.search(r"\d+", answer)
    return None if found is None else found[0]
