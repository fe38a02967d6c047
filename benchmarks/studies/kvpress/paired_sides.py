"""Our answers in pairs with kvpress's to the same questions: tables of docs/studies/kvpress.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.difference import Difference
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line, measured
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.kvpress.methods import METHODS
from benchmarks.studies.quality.paired import Setting, question_of, setting_of
from benchmarks.studies.quality.tables import nats, points

Answers = dict[str, Line]
"""Lines by question."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Answers of one side under a method, to the questions that both sides have answered.

    Attributes:
        score: mean score.
        loss_over_full: mean loss of a right answer over that under the same side's full cache, in nats per token, over
            the questions that have one right answer; None without such a question.
        seen_share: share of the context that attention saw.
        kept_share: bytes of keys and values over those of the full cache.
    """

    score: float
    loss_over_full: float | None
    seen_share: float
    kept_share: float

    @classmethod
    def of(cls, found: Sequence[Line], full: Answers) -> Side:
        losses = differences((line, full[question_of(line)]) for line in found)
        return cls(
            score=mean(line["score"] for line in found),
            loss_over_full=mean(losses) if losses else None,
            seen_share=mean(line["seen_share"] for line in found),
            kept_share=mean(line["kv_bytes"] / line["full_kv_bytes"] for line in found),
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A method on both sides.

    Attributes:
        score, loss: differences of ours to kvpress's, question by question; no loss as in `Side`.
        largest: largest difference of two losses, in nats per token.
    """

    method: str
    ours: Side
    theirs: Side
    score: Difference
    loss: Difference | None
    largest: float
    questions: int

    @classmethod
    def of(cls, method: str, ours: Answers, theirs: Answers, full: tuple[Answers, Answers]) -> Pair | None:
        """None where no question was answered on both sides, under the method and under the full cache."""
        both = [each for each in ours if all(each in answers for answers in (theirs, *full))]
        if not both:
            return None
        sides = [ours[each] for each in both], [theirs[each] for each in both]
        losses = differences(zip(*sides, strict=True))
        return cls(
            method=method,
            ours=Side.of(sides[0], full[0]),
            theirs=Side.of(sides[1], full[1]),
            score=Difference.of([own["score"] - other["score"] for own, other in zip(*sides, strict=True)]),
            loss=Difference.of(losses) if losses else None,
            largest=max(map(abs, losses), default=0.0),
            questions=len(both),
        )


def differences(pairs: Iterable[tuple[Line, Line]]) -> list[float]:
    """Differences of the loss of a right answer in nats per token, of the questions that have one."""
    both = ((line["details"]["nll"], other["details"]["nll"]) for line, other in pairs)
    return [own - reference for own, reference in both if own is not None and reference is not None]


def pairs(found: Sequence[Line]) -> dict[tuple[Setting, str], list[Pair]]:
    """Methods on both sides, by setting and budget, the full cache first; the newest line of a repeated answer."""
    answers: dict[Setting, dict[tuple[str, str | None, bool], Answers]] = {}
    for line in found:
        of_setting = answers.setdefault(setting_of(line), {})
        budget = None if line["method"] == FULL else budget_text(line["budget"])
        of_setting.setdefault((line["method"], budget, "kvpress" in line), {})[question_of(line)] = line
    made: dict[tuple[Setting, str], list[Pair]] = {}
    for setting, sides in answers.items():
        full = tuple(sides.get((FULL, None, theirs), {}) for theirs in (False, True))
        for budget in sorted({budget for _, budget, _ in sides if budget is not None}):
            found_pairs = [
                Pair.of(name, sides.get((name, of, False), {}), sides.get((name, of, True), {}), (full[0], full[1]))
                for name, of in [(FULL, None), *((name, budget) for name in METHODS)]
            ]
            made[setting, budget] = [pair for pair in found_pairs if pair is not None]
    return {key: of_setting for key, of_setting in made.items() if of_setting}


def tables(found: list[Line]) -> str:
    """A table of each setting and budget."""
    parts = []
    for ((model, _, length), budget), of_setting in pairs(found).items():
        lines = [line for line in found if setting_of(line)[::2] == (model, length)]
        versions = [line["kvpress"] for line in lines if "kvpress" in line][-1:]
        told = ", ".join(f"{name} {number}" for of_side in versions for name, number in of_side.items())
        questions = max(pair.questions for pair in of_setting)
        heading = f"**{model}, {length}, {budget} kept**: {questions} questions; {told}; {measured(lines)}"
        parts.append(f"{heading}\n\n{markdown(table(of_setting))}")
    return "\n".join(parts)


def table(of_setting: Sequence[Pair]) -> Rows:
    """Rows of one setting, ours before kvpress's."""
    made: Rows = [
        (
            "method",
            "seen",
            "bytes",
            "score",
            "loss over full",
            "score, ours - kvpress",
            "loss, ours - kvpress",
            "largest",
            "n",
        )
    ]
    for pair in of_setting:
        both = pair.ours, pair.theirs
        made.append(
            (
                pair.method,
                " / ".join(f"{side.seen_share:.0%}" for side in both),
                " / ".join(f"{side.kept_share:.0%}" for side in both),
                " / ".join(f"{side.score:.0%}" for side in both),
                " / ".join("-" if side.loss_over_full is None else f"{side.loss_over_full:+.2f}" for side in both),
                points(pair.score),
                nats(pair.loss),
                f"{pair.largest:.1g}",
                str(pair.questions),
            )
        )
    return made
