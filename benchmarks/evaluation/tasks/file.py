"""Questions of a user's own, a JSON object per line of a file; LongBench's files are read too."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.evaluation import metrics
from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import Metric
from benchmarks.evaluation.options import FileTaskOptions, Score
from benchmarks.evaluation.tasks.answering import AnswerTask, Item
from benchmarks.evaluation.tasks.base import COST_OF_NEW, Case, Outcome, Runtime
from benchmarks.harness import lines
from launch.inputs.text_files import read_text
from runahead.config import not_one_of

NEW_TOKENS = 32
"""Most tokens of an answer, if neither the options nor the data set says so."""
METRICS: dict[Score, Metric] = {
    Score.exact_match: metrics.EXACT_MATCH,
    Score.contained: metrics.CONTAINED,
    Score.f1: metrics.F1,
    Score.perplexity: metrics.PERPLEXITY,
}
KEYS = ("prompt", "question", "answers", "metric")
"""Keys that a line of a user's own may have."""
LONGBENCH = {
    "narrativeqa": 128,
    "qasper": 128,
    "multifieldqa_en": 64,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "triviaqa": 32,
}
"""Data sets of LongBench (Bai et al., 2024, arXiv 2308.14508) that are scored by F1, and their most new tokens."""
CONTINUED = ("triviaqa",)
"""Data sets whose input continues the context's examples; answers are read up to the first line break."""
UNNAMED = "LongBench"
"""Kind of LongBench's lines that name no data set."""
LONGBENCH_ASKED = "\n\nAnswer in as few words as you can.\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class FileQuestion:
    """One line of a file.

    Attributes:
        name: file and line, for messages.
        prompt, question: the text before the question, and the question, which ends where the answer begins.
        answers: right answers, each for itself.
        score: how an answer is scored; None if the line does not say.
        new_tokens: most tokens of an answer; None if the line does not say.
        kind: the data set; None for lines of a user's own.
        first_line: whether an answer ends at a line break, for exact match and F1.
        digest: of the line's content.
    """

    name: str
    prompt: str
    question: str
    answers: list[str]
    score: Score | None
    new_tokens: int | None
    kind: str | None
    first_line: bool
    digest: str


class FileTask(AnswerTask):
    """Scores of answers to the questions of a file, the best over a question's answers; or the perplexity of the first.

    Answers are generated greedily. Text is compared without case, and for exact match and F1 without punctuation,
    articles and repeated spaces, as SQuAD's and LongBench's scores do.
    """

    def __init__(self, options: FileTaskOptions, material: Material) -> None:
        self._options, self.material, self.question = options, material, options.question
        asked = read(options)
        self._score = _score_of(options, asked)
        self.metric = METRICS[self._score]
        self._asked = dict(list(asked.items())[: options.samples])
        self.cases = [
            {"line": number, "digest": each.digest} | ({} if each.kind is None else {"kind": each.kind})
            for number, each in self._asked.items()
        ]
        self.settings = {
            "metric": self._score.name,
            "question": options.question.name,
            "new_tokens": options.new_tokens,
            "most_tokens": options.most_tokens,
        }
        for case in self.cases:
            item = self.item(case)
            num_tokens = len(item.context) + len(item.question)
            material.require_positions(
                f"{self._asked[case['line']].name} with {item.new_tokens} new tokens",
                num_tokens + max(item.new_tokens, len(self.reference_ids(item))),
                "give tasks=[{name:file,path:...,most_tokens:<n>}], which takes the middle out of longer prompts, as "
                "LongBench does",
            )

    def cost(self, case: Case) -> float:
        each = self._asked[case["line"]]
        return len(each.prompt) / 4 + COST_OF_NEW * self._new_tokens(each)

    def item(self, case: Case) -> Item:
        """The question of a line.

        Raises:
            ValueError: `most_tokens` leaves no room for the prompt.
        """
        each = self._asked[case["line"]]
        ids, prefix = self.material.ids, self.material.prefix
        context, question = prefix + ids(each.prompt), ids(each.question)
        most = self._options.most_tokens
        if most is not None and len(context) + len(question) > most:
            room = most - len(question) - len(prefix)
            if room < 2:
                raise ValueError(
                    f"{each.name} has a question of {len(question):,} tokens, for which most_tokens={most} has no "
                    "room; give more"
                )
            body = context[len(prefix) :]
            context = prefix + body[: room - room // 2] + body[-(room // 2) :]
        answer = each.answers[0]
        is_apart = answer[0].isspace() or (each.question or each.prompt)[-1].isspace()
        return Item(
            context=context,
            question=question,
            answers=each.answers,
            reference=answer if is_apart else f" {answer}",
            new_tokens=self._new_tokens(each),
            generates=self._score is not Score.perplexity,
            details={"first_line": each.first_line},
        )

    def score(self, answer: str, item: Item) -> float:
        if self._score is Score.perplexity:
            return 0.0  # `outcomes` has it of the loss
        is_line = item.details["first_line"] and self._score is not Score.contained
        text = answer.strip().partition("\n")[0] if is_line else answer
        return max(SCORES[self._score](text, each) for each in item.answers)

    def outcomes(
        self, runtime: Runtime, contenders: Sequence[Contender], item: Item
    ) -> Iterator[tuple[Contender, Outcome]]:
        for contender, outcome in super().outcomes(runtime, contenders, item):
            if self._score is Score.perplexity:
                perplexity = math.exp(outcome.details["nll"])
                outcome = replace(outcome, score=perplexity, weight=len(self.reference_ids(item)))
            yield contender, outcome

    def _new_tokens(self, each: FileQuestion) -> int:
        if self._score is Score.perplexity:
            return 0
        return self._options.new_tokens or each.new_tokens or NEW_TOKENS


def read(options: FileTaskOptions) -> dict[int, FileQuestion]:
    """The questions of a file by line number.

    Raises:
        ValueError: in one line that names file and line.
    """
    path = options.path
    assert path is not None, "checked by its options"
    name = f"tasks path={path}"
    # Only "\n" ends a line: a JSON string may contain other characters at which splitlines() would split it.
    numbered = enumerate(read_text(path, name).split("\n"), start=1)
    asked = {number: _asked(line, f"{name} line {number}") for number, line in numbered if line.strip()}
    if not asked:
        raise ValueError(f"{name} is empty; give a question per line")
    return asked


def _asked(line: str, name: str) -> FileQuestion:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    is_longbench = isinstance(entry, dict) and {"context", "input"} <= entry.keys()
    if not isinstance(entry, dict) or not (is_longbench or "prompt" in entry):
        raise ValueError(
            f'{name} is no object with {{"prompt": text, "question": text, "answers": [text, ...]}}, nor LongBench\'s '
            "with context, input and answers"
        )
    for key in entry:
        if is_longbench and key in KEYS and key != "answers":
            raise ValueError(
                f"{name} has context and input, as LongBench's lines have, and {key}, which those have not"
            )
        if not is_longbench and key not in KEYS:
            raise ValueError(f"{name} has {key}, which {not_one_of(key, KEYS)}")
    prompt, question = (
        _text(entry, field, name) for field in (("context", "input") if is_longbench else ("prompt", "question"))
    )
    answers = _answers(entry, name)
    if not prompt.strip():
        raise ValueError(f"{name} has an empty prompt, of which policies could keep nothing; leave the line out")
    digest = lines.key(entry)
    if not is_longbench:
        return FileQuestion(
            name=name,
            prompt=prompt,
            question=question,
            answers=answers,
            score=_named_score(entry, name),
            new_tokens=None,
            kind=None,
            first_line=True,
            digest=digest,
        )
    dataset = str(entry.get("dataset", "")).removesuffix("_e")
    is_asked = dataset in LONGBENCH and dataset not in CONTINUED
    return FileQuestion(
        name=name,
        prompt=prompt,
        question=LONGBENCH_ASKED.format(question=question) if is_asked else f"\n\n{question}",
        answers=answers,
        score=Score.f1 if dataset in LONGBENCH else None,
        new_tokens=LONGBENCH.get(dataset),
        kind=dataset or UNNAMED,
        first_line=dataset in CONTINUED,
        digest=digest,
    )


def _text(entry: dict[str, Any], field: str, name: str) -> str:
    value = entry.get(field, "")
    if not isinstance(value, str):
        raise ValueError(f"{name}: {field}={json.dumps(value)[:80]} must be text")
    return value


def _answers(entry: dict[str, Any], name: str) -> list[str]:
    given = entry.get("answers")
    answers: list[Any] = given if isinstance(given, list) else [given]
    if not answers or not all(isinstance(each, str) and each.strip() for each in answers):
        raise ValueError(f"{name}: answers={json.dumps(given)[:80]} must be a text or a list of texts, none empty")
    return answers


def _named_score(entry: dict[str, Any], name: str) -> Score | None:
    """The score that a line of a user's own names."""
    given = entry.get("metric")
    if given is None:
        return None
    if given not in Score.__members__:
        raise ValueError(f"{name}: metric={given} is not one of {', '.join(Score.__members__)}")
    return Score[given]


def _score_of(options: FileTaskOptions, asked: dict[int, FileQuestion]) -> Score:
    """The score of all lines: that of the options, or that which the lines name, or whether an answer is contained."""
    if options.metric is not None:
        return options.metric
    first, *others = asked.values()
    if first.kind is not None and first.score is None:
        is_unnamed = first.kind == UNNAMED
        of_data_set = f"is of LongBench's {first.kind}, which is not scored by F1"
        raise ValueError(
            f"{first.name} {'has no dataset, which would say its score' if is_unnamed else of_data_set}; give "
            f"tasks=[{{name:file,path:{options.path},metric:<{'|'.join(Score.__members__)}>}}]"
        )
    for each in others:
        if each.score is not first.score:
            told = [("no metric" if one.score is None else one.score.name) for one in (each, first)]
            raise ValueError(
                f"{each.name} has {told[0]} and {first.name} has {told[1]}; give all lines the same, or use a file for "
                "each"
            )
    return first.score or Score.contained


def normalised(text: str) -> str:
    """Text without case, punctuation, articles and repeated spaces."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def exact_match(answer: str, wanted: str) -> float:
    return float(normalised(answer) == normalised(wanted))


def contained(answer: str, wanted: str) -> float:
    return float(wanted.strip().lower() in answer.lower())


def f1(answer: str, wanted: str) -> float:
    """Harmonic mean of the shares of words of each that are in the other."""
    said, right = normalised(answer).split(), normalised(wanted).split()
    num_same = (Counter(said) & Counter(right)).total()
    return 2 * num_same / (len(said) + len(right)) if num_same else 0.0


SCORES: dict[Score, Callable[[str, str], float]] = {
    Score.exact_match: exact_match,
    Score.contained: contained,
    Score.f1: f1,
}
"""Answer, right answer -> score from 0 to 1."""
