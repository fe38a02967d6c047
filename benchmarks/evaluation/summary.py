"""Summary of measured lines: one row per task, policy and budget, for the report, the table and the pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.difference import LEAST_PAIRS, Difference, in_points
from benchmarks.evaluation.metrics import METRICS
from benchmarks.evaluation.tasks import TASKS, kind_of
from benchmarks.harness import lines
from benchmarks.harness.lines import Line, is_above_0, is_number, is_text, or_none
from benchmarks.harness.text_table import Rows, mebibytes
from policies.options import Budget
from runahead.picture_style import seconds

FULL = "full"
"""Name of the reference policy, which keeps the full cache."""
CELL = ("length", "depth")
"""Fields that identify a cell of a heat map, in tasks that have them."""

FIELDS: dict[str, Any] = {
    "task": lambda task: is_text(task) and kind_of(task) in TASKS,
    "metric": lambda metric: is_text(metric) and metric in METRICS,
    "policy": is_text,
    "budget": or_none(is_above_0),
    "case": lambda case: isinstance(case, dict) and not any(isinstance(each, list | dict) for each in case.values()),
    "score": is_number,
    "weight": is_above_0,
    "num_tokens": is_above_0,
    "kept_tokens": [is_number],
    "kv_bytes": is_number,
    "full_kv_bytes": is_above_0,
    "ttft_s": is_number,
    "tpot_s": or_none(is_number),
    "details": {},
    **dict.fromkeys(("key", "comparison", "model", "dtype", "device"), is_text),
}
"""Fields that the report and the pictures need in a line, in the form of `benchmarks.harness.lines.fits`."""

ADDED: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "seen_share": (None, or_none(is_number)),
    "host_bytes": (0, is_number),
    "once": (None, or_none(is_text)),
}
"""Fields that lines of earlier versions lack: their values there, and their forms."""


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """Summary of one policy and budget in one task, with the fields of the JSON report.

    Attributes:
        metric: name of the task's score, with its unit.
        once: why the policy does not run under each budget; None if it does.
        over_full: mean difference of the scores to the full cache's in the same cases; None without these.
        measurements: number of lines.
        kv_share: KV cache bytes over those of the full cache.
        host_share: bytes of the pool from which a policy retrieves, over those of the full cache.
        seen_share: share of the context that attention of generated tokens saw; None if a line does not have it.
        kept_shares: per layer, kept tokens over tokens of the context.
        batch: number of rows that fit into the budget of throughput; None in other tasks.
        cells: scores by length and depth, means over samples; empty in tasks without them.
        kinds: scores by kind of question; empty in tasks without them.
    """

    task: str
    metric: str
    policy: str
    budget: Budget | None
    once: str | None
    score: float
    over_full: Difference | None
    measurements: int
    kv_share: float
    kv_bytes: float
    full_kv_bytes: float
    host_share: float
    seen_share: float | None
    kept_shares: list[float]
    ttft_s: float
    tpot_s: float | None
    batch: int | None
    cells: dict[tuple[int, float], float]
    kinds: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """The row as a mapping for the JSON report, without the fields that its task does not have."""
        cells = [dict(zip((*CELL, "score"), (*cell, score), strict=True)) for cell, score in sorted(self.cells.items())]
        fields = asdict(self) | {"cells": cells}
        return {
            name: value for name, value in fields.items() if name not in ("once", "batch", "cells", "kinds") or value
        }


def read(path: Path) -> list[Line]:
    """Read all lines of a file. Raises: ValueError: a line is not a measurement of an evaluation."""
    found = lines.read(path, option="lines", kind="task", fields=FIELDS)
    for number, line in enumerate(found, start=1):
        for name, (default, form) in ADDED.items():
            if not form(line.setdefault(name, default)):
                raise ValueError(f"lines={path}: line {number} is a damaged measurement, see its {name}; remove it")
    return found


def latest(found: Sequence[Line]) -> list[Line]:
    """The lines of every task that are comparable with its last one; the last line of each repeated measurement."""
    comparison = {line["task"]: line["comparison"] for line in found}
    by_key = {line["key"]: line for line in found if line["comparison"] == comparison[line["task"]]}
    return list(by_key.values())


def rows(found: Sequence[Line]) -> list[SummaryRow]:
    """Group lines into rows, in the order of tasks and of the lines; all rows of a task are together."""
    groups: dict[tuple[str, str, Budget | None], list[Line]] = {}
    full: dict[tuple[str, str], float] = {}
    for line in found:
        groups.setdefault((line["task"], line["policy"], line["budget"]), []).append(line)
        if line["policy"] == FULL:
            full[_asked(line)] = line["score"]
    made = [_row(task, policy, budget, group, full) for (task, policy, budget), group in groups.items()]
    tasks = sorted(dict.fromkeys(row.task for row in made), key=lambda task: list(TASKS).index(kind_of(task)))
    return sorted(made, key=lambda row: tasks.index(row.task))


def _asked(line: Line) -> tuple[str, str]:
    """Task and case, which are the same for all policies that are compared."""
    return line["task"], str(line["case"])


def _row(
    task: str, policy: str, budget: Budget | None, group: list[Line], full: dict[tuple[str, str], float]
) -> SummaryRow:
    metric = METRICS[group[-1]["metric"]]
    over_full = [line["score"] - full[_asked(line)] for line in group if _asked(line) in full]
    tpots = [line["tpot_s"] for line in group if line["tpot_s"] is not None]
    shares = [[kept / line["num_tokens"] for kept in line["kept_tokens"]] for line in group]
    seen = [line["seen_share"] for line in group if line["seen_share"] is not None]
    by_cell: dict[tuple[int, float], list[float]] = {}
    by_kind: dict[str, list[float]] = {}
    for line in group:
        if all(name in line["case"] for name in CELL):
            by_cell.setdefault((line["case"]["length"], line["case"]["depth"]), []).append(line["score"])
        if "kind" in line["case"]:
            by_kind.setdefault(line["case"]["kind"], []).append(line["score"])
    kv_bytes, full_kv_bytes, host_bytes = (
        _mean([line[name] for line in group]) for name in ("kv_bytes", "full_kv_bytes", "host_bytes")
    )
    return SummaryRow(
        task=task,
        metric=metric.name,
        policy=policy,
        budget=budget,
        once=group[-1]["once"],
        score=metric.combine([line["score"] for line in group], [line["weight"] for line in group]),
        over_full=Difference.with_interval(over_full) if over_full and policy != FULL else None,
        measurements=len(group),
        kv_share=kv_bytes / full_kv_bytes,
        kv_bytes=kv_bytes,
        full_kv_bytes=full_kv_bytes,
        host_share=host_bytes / full_kv_bytes,
        seen_share=_mean(seen) if len(seen) == len(group) else None,
        kept_shares=[_mean(layer) for layer in zip(*shares, strict=True)],
        ttft_s=median(line["ttft_s"] for line in group),
        tpot_s=median(tpots) if tpots else None,
        batch=group[-1]["details"].get("rows"),
        cells={cell: _mean(scores) for cell, scores in by_cell.items()},
        kinds={kind: _mean(scores) for kind, scores in by_kind.items()},
    )


def table(of_task: Sequence[SummaryRow]) -> Rows:
    """Make the table of one task's rows, for a terminal or Markdown.

    *Over full* is the mean difference to the full cache in the same cases, shares in percentage points, with its 95%
    interval if there are cases enough.
    """
    is_share = METRICS[of_task[0].metric].is_share
    made: Rows = [
        (
            "policy",
            "budget",
            of_task[0].metric,
            "over full",
            "K,V kept",
            "K,V",
            "in host memory",
            "saw",
            "median TTFT",
            "median TPOT",
            "n",
            "batch",
        ),
        *(
            (
                row.policy,
                budget_text(row.budget),
                score_text(row),
                "-" if row.over_full is None else row.over_full.told(in_points if is_share else "{:+.2f}".format),
                f"{row.kv_share:.1%}",
                mebibytes(row.kv_bytes),
                f"{row.host_share:.1%}" if row.host_share else "-",
                "-" if row.seen_share is None else f"{row.seen_share:.1%}",
                seconds(row.ttft_s),
                "-" if row.tpot_s is None else seconds(row.tpot_s),
                str(row.measurements),
                "-" if row.batch is None else str(row.batch),
            )
            for row in of_task
        ),
    ]
    has_batches = any(row.batch is not None for row in of_task)
    return made if has_batches else [cells[:-1] for cells in made]


def notes(found: Sequence[SummaryRow], path: str | Path | None) -> list[str]:
    """Sentences for below the tables: why a policy ran once, what *over full* lacks, and where it says nothing.

    Args:
        path: the file of the lines, if there is one.
    """
    told = []
    if any(row.budget is not None for row in found):
        told += [f"{row.policy} ran once: {row.once}" for row in found if row.once is not None]
    compared = [row.over_full for row in found if row.policy != FULL]
    if None in compared:
        told.append("over full is - where the full cache was not measured in the same cases")
    if any(each is not None and each.interval is None for each in compared):
        told.append(f"over full has no 95% interval where it is of fewer than {LEAST_PAIRS} cases")
    where = "with lines=<jsonl>" if path is None else f"in {path}"
    told += [
        f"{row.task}: the full cache itself scores 0, so differences to it say nothing; see its answers {where}"
        for row in found
        if row.policy == FULL and METRICS[row.metric].is_share and row.score == 0
    ]
    return list(dict.fromkeys(told))


def score_text(row: SummaryRow) -> str:
    """Format a score in the task's unit."""
    if METRICS[row.metric].is_share:
        return f"{row.score:.0%}"
    return f"{row.score:.3f}" if row.score < 10 else f"{row.score:.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
