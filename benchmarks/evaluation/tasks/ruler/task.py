"""The task `ruler` of an evaluation: questions of RULER's tasks, scored as published."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import RECALL
from benchmarks.evaluation.options import RULER_FILES, RULER_SETS, EvaluateRun
from benchmarks.evaluation.tasks.answering import AnswerTask, Item, recall
from benchmarks.evaluation.tasks.base import COST_OF_NEW, Case
from benchmarks.evaluation.tasks.ruler import NEW_TOKENS, NEW_TOKENS_OF_NEEDLES, PROMPTS, MakePrompt, documents
from benchmarks.evaluation.tasks.ruler.base import NoRoomError


class Ruler(AnswerTask):
    """Share of the strings of a right answer that answers hold; in qa_1 and qa_2 whether they hold one of them.

    The strings of some tasks (`RULER_SETS`) are right in any order, so their answers are always generated, and have no
    loss.

    Cases of all tasks take turns, so that an evaluation that is stopped early has the same number of each.
    """

    metric = RECALL
    needs_text = True

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.ruler
        self.material, self.question = material, options.question
        self._prompts = {name: self._maker(name) for name in options.tasks}
        self.cases = [
            {"kind": name, "length": length, "sample": sample} | self._of_set(name)
            for sample, length, name in product(range(options.samples), options.lengths, options.tasks)
        ]
        self.settings = {"question": options.question.name, "new_tokens": options.new_tokens}
        shortest, longest = min(options.lengths), max(options.lengths)
        for name in options.tasks:
            item = self.item({"kind": name, "length": shortest, "sample": 0})  # raises if there is no room
            new_tokens = max(item.new_tokens, len(self.reference_ids(item)))
            material.require_positions(f"ruler.lengths={longest} with {new_tokens} new tokens", longest + new_tokens)
        if "cwe" in options.tasks:
            self.item({"kind": "cwe", "length": longest, "sample": 0})  # raises if the text has too few words

    def cost(self, case: Case) -> float:
        return case["length"] + COST_OF_NEW * self._new_tokens(case["kind"]) / 2

    def item(self, case: Case) -> Item:
        """Build the question of a case.

        Raises:
            ValueError: there is no room for it, or too little text.
        """
        name, length = case["kind"], case["length"]
        draw = random.Random(f"ruler {name} {length} {case['sample']}")
        try:
            prompt = self._prompts[name](draw, length - len(self.material.prefix), self.material)
        except NoRoomError as error:
            raise ValueError(
                f"ruler.lengths={length} has no room for a question of {name}; use more tokens, or leave {name} out "
                "of ruler.tasks"
            ) from error
        return Item(
            context=self.material.prefix + self.material.ids(prompt.context),
            question=self.material.ids(prompt.question),
            answers=prompt.answers,
            reference=None if name in RULER_SETS else prompt.reference,
            new_tokens=self._new_tokens(name),
            details={"any_answer": prompt.any_answer},
        )

    def score(self, answer: str, item: Item) -> float:
        if item.details["any_answer"]:
            return max(recall(answer, [each]) for each in item.answers)
        return recall(answer, item.answers)

    def _of_set(self, name: str) -> Case:
        """Further entry of a case whose answer is generated in any case; lines without it had another score."""
        return {"new_tokens": self._new_tokens(name)} if name in RULER_SETS else {}

    def _new_tokens(self, name: str) -> int:
        given = self._options.new_tokens
        if given is None or (given == 0 and name in RULER_SETS):
            return NEW_TOKENS.get(name, NEW_TOKENS_OF_NEEDLES)
        return given

    def _maker(self, name: str) -> MakePrompt:
        """The function that makes prompts of a task. Raises: ValueError: its file of questions is missing or wrong."""
        if name not in RULER_FILES:
            return PROMPTS[name]
        option = RULER_FILES[name]
        path = getattr(self._options, option)
        if path is None:
            raise ValueError(
                f"ruler.tasks has {name}, which needs ruler.{option}=<{documents.SOURCES[option]}>; give it, or leave "
                f"{name} out"
            )
        return partial(documents.prompt, documents.document_set(option, path))
