"""Scores of policies in pairs with the full cache's, on the same questions, with intervals of the mean difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.difference import Difference
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line
from benchmarks.studies.quality.methods import FAMILIES, share_of
from policies.options import Budget

Setting = tuple[str, str, str]
"""Model, protocol and length of the context: figures of two settings are not compared."""

Pair = tuple[Line, Line]
"""A line of a policy, and that of its reference with the same question."""


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One policy under one budget, on the questions that its reference was asked too.

    Attributes:
        budget: of a method in `methods.py` without a budget, its share.
        scores: mean score by kind of question.
        kept_share: bytes of keys, values and indices, in host memory too, over those of the full cache.
        seen_share: share of the context that attention of generated tokens saw.
        score: difference of scores to the reference (the full cache, or a wrapper's scorer).
        loss: difference of the loss of a right answer in nats per token, over the questions that have one right answer;
            None without such a question.
        pairs: number of questions.
        ttft: median time to first token, over that of the reference with the same question in the same run; None if
            they were measured in different ones, perhaps on other machines.
    """

    policy: str
    budget: Budget | None
    scores: dict[str, float]
    kept_share: float
    seen_share: float
    score: Difference
    loss: Difference | None
    pairs: int
    ttft: float | None

    @property
    def name(self) -> str:
        return self.policy if self.budget is None else f"{self.policy}, {budget_text(self.budget)}"


def settings(found: Sequence[Line]) -> dict[Setting, list[Line]]:
    """Lines by setting; of a question that was asked twice under a policy, the newest line.

    Lines of a policy that read another file of the model than in its newest line are left out, and lists of keys about
    which nothing but methods of `methods.py` were asked: `losses.py` compares those.
    """
    asked = [line for line in found if line["task"] != "copy"]
    newest = {(*_row_of(line), question_of(line)): line for line in asked}
    files = {_row_of(line): _files_of(line) for line in asked}
    groups: dict[Setting, list[Line]] = {}
    for line in newest.values():
        if _files_of(line) == files[_row_of(line)]:
            groups.setdefault(setting_of(line), []).append(line)
    return {setting: group for setting, group in groups.items() if not _is_of_methods(group)}


def _row_of(line: Line) -> tuple[Setting, str, str]:
    return setting_of(line), line["policy"], str(line["budget"])


def _files_of(line: Line) -> dict[str, str]:
    """Digests of the files that the line's policy read; lines from before these were written have none."""
    return line.get("policy_files") or {}


def _is_of_methods(group: Sequence[Line]) -> bool:
    entries = [entry for family in FAMILIES.values() for method in family for entry in method.entries]
    compared = [line for line in group if line["policy"] != FULL]
    of_methods = (line["task"] == "key_value" and line["policy_settings"] in entries for line in compared)
    return bool(compared) and all(of_methods)


def setting_of(line: Line) -> Setting:
    length = f"{line['case']['length']:,} tokens" if "length" in line["case"] else f"{line['details']['pairs']} keys"
    return line["model"], line["task_settings"]["question"], length


def question_of(line: Line) -> str:
    return f"{line['task']} {line['case']} {line['details'].get('pairs')}"


def kind_of(line: Line) -> str:
    """Kind of a question: the task of RULER, or the evaluation's task."""
    kind: str = line["case"].get("kind", line["task"])
    return kind


def rows(of_setting: Sequence[Line]) -> list[PolicyRow]:
    """One row per policy and budget, the full cache first."""
    full = {question_of(line): line for line in of_setting if line["policy"] == FULL}
    return _rows((line, full.get(question_of(line))) for line in of_setting)


def over_scorers(of_setting: Sequence[Line]) -> list[PolicyRow]:
    """One row per policy that wraps a scorer, and budget, over the scorer's own choice on the same questions."""
    asked = {(question_of(line), str(line["policy_settings"])): line for line in of_setting}
    return _rows(
        (line, asked.get((question_of(line), str(line["policy_settings"].get("scorer"))))) for line in of_setting
    )


def _rows(pairs: Iterable[tuple[Line, Line | None]]) -> list[PolicyRow]:
    """Rows of the lines that have a reference."""
    groups: dict[tuple[str, Budget | None], list[Pair]] = {}
    for line, reference in pairs:
        if reference is not None:
            named = share_of(line["policy_settings"]) if line["budget"] is None else None
            groups.setdefault(named or (line["policy"], line["budget"]), []).append((line, reference))
    made = [_row(policy, budget, group) for (policy, budget), group in groups.items()]
    return sorted(made, key=lambda row: (row.policy != FULL, row.policy, row.budget or 0))


def _row(policy: str, budget: Budget | None, pairs: list[Pair]) -> PolicyRow:
    group = [line for line, _ in pairs]
    kinds: dict[str, list[float]] = {}
    for line in group:
        kinds.setdefault(kind_of(line), []).append(line["score"])
    both = ((line["details"]["nll"], other["details"]["nll"]) for line, other in pairs)
    losses = [own - reference for own, reference in both if own is not None and reference is not None]
    ratios = [line["ttft_s"] / other["ttft_s"] for line, other in pairs if line["date"] == other["date"]]
    return PolicyRow(
        policy=policy,
        budget=budget,
        scores={kind: mean(scores) for kind, scores in kinds.items()},
        kept_share=mean((line["kv_bytes"] + line["host_bytes"]) / line["full_kv_bytes"] for line in group),
        seen_share=mean(line["seen_share"] for line in group),
        score=Difference.with_interval([line["score"] - other["score"] for line, other in pairs]),
        loss=Difference.with_interval(losses) if losses else None,
        pairs=len(pairs),
        ttft=median(ratios) if ratios else None,
    )
