"""JSON lines of an evaluation: their fields, and the keys that identify measurements."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Text
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.tasks import TASKS, Task
from benchmarks.evaluation.tasks.base import Case, Outcome
from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line, is_above_0, is_number, is_text, or_none
from partitioner.table.fingerprint import now
from runahead.ranks.ranks import Ranks
from runahead.report import library_versions

MEASURED = ("runahead", "policies", "benchmarks/evaluation")
"""Folders whose code affects measurements; a digest of them is part of every key."""

FIELDS: dict[str, Any] = {
    "task": lambda task: isinstance(task, str) and task in TASKS,
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


@dataclass(frozen=True, kw_only=True)
class Record:
    """Fields that all lines share, known before the model is loaded, so that a finished run need not load it.

    Attributes:
        about: settings that must agree for two measurements to be compared.
        date, commit: when and by which code it was measured, for readers.
    """

    about: dict[str, Any]
    date: str
    commit: str | None

    @classmethod
    def of(cls, run: EvaluateRun, ranks: Ranks, config: Any, text: Text | None, num_threads: int | None) -> Record:
        """Make the record of a run. `config` is the transformers configuration of the text model."""
        about = {
            "model_options": repr(run.model),
            "model_config": _digest(config.to_json_string()),
            "text": None if text is None else _digest(text.content),
            "code": machine.code(MEASURED),
            "hardware": machine.hardware(),
            "versions": library_versions(),
            "device": ranks.device.type,
            "threads": num_threads,
        }
        return cls(about=about, date=now(), commit=machine.commit())

    def comparison(self, name: str, task: Task) -> str:
        """Key that measurements of a task share if they can be compared."""
        text = self.about["text"] if task.needs_text else None
        return lines.key(self.about | {"text": text, "task": name, "settings": task.settings})

    def key(self, name: str, task: Task, contender: Contender, case: Case) -> str:
        """Key of one measurement."""
        return lines.key({"comparison": self.comparison(name, task), "policy": contender.settings, "case": case})

    def line(
        self, name: str, task: Task, contender: Contender, case: Case, outcome: Outcome, *, model: str, dtype: str
    ) -> Line:
        """JSON line of one measurement."""
        return {
            "task": name,
            "policy": contender.label,
            "budget": contender.budget,
            "case": case,
            "score": outcome.score,
            "metric": task.metric,
            "weight": outcome.weight,
            **asdict(outcome.kv),
            "ttft_s": outcome.ttft_s,
            "tpot_s": outcome.tpot_s,
            "details": outcome.details,
            "policy_settings": contender.settings,
            "task_settings": task.settings,
            "key": self.key(name, task, contender, case),
            "comparison": self.comparison(name, task),
            "model": model,
            "dtype": dtype,
            "date": self.date,
            "commit": self.commit,
            **self.about,
        }


def latest(found: Sequence[Line]) -> list[Line]:
    """For every task, the lines comparable with its last one; the last line of each repeated measurement."""
    comparison = {line["task"]: line["comparison"] for line in found}
    by_key = {line["key"]: line for line in found if line["comparison"] == comparison[line["task"]]}
    return list(by_key.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
