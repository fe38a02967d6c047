"""Summary of measured lines: one row per task, policy and budget, for the report and the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.tasks import TASKS
from benchmarks.harness.lines import Line
from benchmarks.harness.text_table import Rows, mebibytes
from policies.base import Budget
from runahead.picture_style import seconds

FULL = "full"
"""Name of the reference policy, which keeps the full cache."""
CELL = ("length", "depth")
"""Fields that identify a cell of a heat map, in tasks that have them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Summary of one policy and budget in one task.

    Attributes:
        kv_share: KV cache bytes over those of the full cache.
        kept_shares: per layer, kept tokens over tokens of the context.
        cells: scores by length and depth, means over samples; empty in tasks without them.
    """

    task: str
    policy: str
    budget: Budget | None
    score: float
    number: int
    kv_bytes: float
    full_kv_bytes: float
    kept_shares: list[float]
    ttft_s: float
    tpot_s: float | None
    cells: dict[tuple[int, float], float]
    details: dict[str, Any]

    @property
    def kv_share(self) -> float:
        return self.kv_bytes / self.full_kv_bytes

    def as_json(self) -> dict[str, Any]:
        """The row as a mapping for the JSON report."""
        cells = [
            {"length": length, "depth": depth, "score": score} for (length, depth), score in sorted(self.cells.items())
        ]
        return {
            "task": self.task,
            "metric": TASKS[self.task].metric,
            "policy": self.policy,
            "budget": self.budget,
            "score": self.score,
            "measurements": self.number,
            "kv_share": self.kv_share,
            "kv_bytes": self.kv_bytes,
            "full_kv_bytes": self.full_kv_bytes,
            "kept_shares": self.kept_shares,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            **self.details,
            **({"cells": cells} if cells else {}),
        }


def rows(found: Sequence[Line]) -> list[Row]:
    """Group lines into rows, in the order of tasks and of the lines."""
    groups: dict[tuple[str, str, Budget | None], list[Line]] = {}
    for line in found:
        groups.setdefault((line["task"], line["policy"], line["budget"]), []).append(line)
    made = [_row(task, policy, budget, group) for (task, policy, budget), group in groups.items()]
    return sorted(made, key=lambda row: list(TASKS).index(row.task))


def _row(task: str, policy: str, budget: Budget | None, group: list[Line]) -> Row:
    tpots = [line["tpot_s"] for line in group if line["tpot_s"] is not None]
    shares = [[kept / line["num_tokens"] for kept in line["kept_tokens"]] for line in group]
    by_cell: dict[tuple[int, float], list[float]] = {}
    for line in group:
        if all(name in line["case"] for name in CELL):
            by_cell.setdefault((line["case"]["length"], line["case"]["depth"]), []).append(line["score"])
    return Row(
        task=task,
        policy=policy,
        budget=budget,
        score=TASKS[task].combine([line["score"] for line in group], [line["weight"] for line in group]),
        number=len(group),
        kv_bytes=_mean([line["kv_bytes"] for line in group]),
        full_kv_bytes=_mean([line["full_kv_bytes"] for line in group]),
        kept_shares=[_mean(layer) for layer in zip(*shares, strict=True)],
        ttft_s=median(line["ttft_s"] for line in group),
        tpot_s=median(tpots) if tpots else None,
        cells={cell: _mean(scores) for cell, scores in by_cell.items()},
        details={"batch": group[-1]["details"]["rows"]} if "rows" in group[-1]["details"] else {},
    )


def table(of_task: Sequence[Row]) -> Rows:
    """Make the table of one task's rows, for a terminal or Markdown."""
    batches = any("batch" in row.details for row in of_task)
    head = ["policy", "budget", TASKS[of_task[0].task].metric, "K,V kept", "K,V", "median TTFT", "median TPOT", "n"]
    made = [tuple([*head, *(["batch"] if batches else [])])]
    for row in of_task:
        cells = [
            row.policy,
            budget_text(row.budget),
            score_text(row),
            f"{row.kv_share:.1%}",
            mebibytes(row.kv_bytes),
            seconds(row.ttft_s),
            "-" if row.tpot_s is None else seconds(row.tpot_s),
            str(row.number),
        ]
        made.append(tuple([*cells, *([str(row.details.get("batch", "-"))] if batches else [])]))
    return made


def score_text(row: Row) -> str:
    """Format a score in the task's unit."""
    if TASKS[row.task].metric == "found":
        return f"{row.score:.0%}"
    return f"{row.score:.3f}" if row.score < 10 else f"{row.score:.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
