"""Plan of an evaluation: its measurements, their keys, and the JSON line of each."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.evaluation import plot, summary
from benchmarks.evaluation.contenders import Contender, contenders
from benchmarks.evaluation.material import Material, Text
from benchmarks.evaluation.options import EvaluateRun, FileTaskOptions
from benchmarks.evaluation.pictures import PICTURES
from benchmarks.evaluation.tasks import TASKS, FileTask, Task, kind_of
from benchmarks.evaluation.tasks.base import Case, Outcome
from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from launch.inputs.text_files import text_or_example
from launch.program.launcher import require_one_rank
from launch.program.written_files import ensure_outputs
from partitioner.table.fingerprint import now
from runahead.config import ModelOptions
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.model import loading
from runahead.model.loading import LoadedWeights
from runahead.model.loading.position_limit import max_positions
from runahead.model.lora import adapter
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.report import library_versions

MEASURED = ("runahead", "policies", "benchmarks/evaluation")
"""Folders whose code affects measurements; a digest of them is part of every key."""

FIRST_MODEL_OPTIONS = ("name", "path", "config", "dtype", "seed", "layers", "trust_remote_code")
"""Options of the model that every line has."""

Step = tuple[str, Case, Contender]
"""One measurement: the name of a task, one of its cases, and a policy under a budget."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All measurements of an evaluation, known before the model is loaded, so that a finished run need not load it.

    Attributes:
        contenders: policies under their budgets.
        tasks: tasks by name.
        about: settings that must agree for two measurements to be compared.
        date, commit: when and by which code it was measured, for readers.
        done: lines of measurements made before.
        across: fields of `about` that may differ: "hardware" where nobody compares times, "code" where what changed in
            it changes no result.
        notes: sentences for below the tables.
    """

    contenders: list[Contender]
    tasks: dict[str, Task]
    about: dict[str, Any]
    date: str
    commit: str | None
    done: list[Line]
    across: Collection[str] = ()
    notes: Sequence[str] = ()

    @classmethod
    def from_options(cls, run: EvaluateRun, ranks: Ranks, *, across: Collection[str] = ()) -> Plan:
        """Check the options and the text, and plan the measurements.

        Raises:
            ValueError, OSError: for a user's mistakes.
        """
        require_one_rank(ranks.size, "policies are evaluated", "python launch/evaluate.py")
        pictures = [] if run.report is None else [plot.picture_path(run.report, name) for name in PICTURES]
        ensure_outputs(run, {"report": [run.report, *pictures], "lines": [run.lines]})
        chosen = contenders(run.policies, run.budgets)
        done = [] if run.lines is None else summary.read(Path(run.lines))
        kinds = {str(task): TASKS[kind_of(str(task))] for task in run.tasks}
        text = None
        if any(kind.needs_text for kind in kinds.values()):
            text = Text(*text_or_example(run.text.file, "text.file"))
        config = loading.load_decoder_config(run.model, progress=True)
        for contender in chosen:
            contender.policies.require_files()
            check(Setup(policies=contender.policies, prefill=contender.prefill, config=config))
        tokenizer = loading.load_tokenizer(run.model)
        speechless = [name for name, kind in kinds.items() if kind.needs_tokenizer]
        if tokenizer is None and speechless:
            raise ValueError(
                f"tasks has {', '.join(speechless)}, which needs a tokenizer, and this model has none; use "
                "tasks=throughput"
            )
        material = Material(
            tokenizer=tokenizer, vocab_size=config.vocab_size, max_positions=max_positions(config), text=text
        )
        tasks = {
            str(task): FileTask(task, material) if isinstance(task, FileTaskOptions) else TASKS[task](run, material)
            for task in run.tasks
        }
        for task in tasks.values():
            for contender in chosen:
                task.check(contender, config.num_hidden_layers)
        chosen, notes = _with_full(chosen, tasks.values(), config.num_hidden_layers)
        adapters = adapter.find(run.model, progress=True)
        about = {
            "model_options": model_options(run.model, [each.digest for each in adapters]),
            "model_config": _digest(config.to_json_string()),
            "text": None if text is None else _digest(text.content),
            "code": machine.code(MEASURED),
            "hardware": machine.hardware(),
            "versions": library_versions(),
            "device": ranks.device.type,
            "threads": None if ranks.device.type == "cuda" else torch.get_num_threads(),
        }
        return cls(
            contenders=chosen,
            tasks=tasks,
            about=about,
            date=now(),
            commit=machine.commit(),
            done=done,
            across=across,
            notes=notes,
        )

    def missing(self) -> list[Step]:
        """Measurements that no line has yet. All policies take turns in a case, so that load affects all of them."""
        known = {self._key_of(line) for line in self.done}
        return [step for key, step in self._steps().items() if key not in known]

    def select(self, found: Sequence[Line]) -> list[Line]:
        """Lines of this plan, in its order."""
        by_key = {self._key_of(line): line for line in found}
        return [by_key[key] for key in self._steps() if key in by_key]

    def _steps(self) -> dict[str, Step]:
        """All measurements by key, in order."""
        comparisons = {name: self._comparison(name, task.settings, self.about) for name, task in self.tasks.items()}
        return {
            self._key(comparisons[name], contender.settings, contender.files, case): (name, case, contender)
            for name, task in self.tasks.items()
            for case in task.cases
            for contender in self.contenders
        }

    def _comparison(self, name: str, settings: object, about: Mapping[str, Any]) -> str:
        """Key that measurements of a task share if this plan compares them."""
        fields = {field: about.get(field) for field in self.about if field not in self.across}
        text = fields["text"] if TASKS[kind_of(name)].needs_text else None
        return lines.key(fields | {"text": text, "task": name, "settings": settings})

    def _key(self, comparison: str, policy: object, files: object, case: Case) -> str:
        """Key of one measurement."""
        read = {"files": files} if files else {}
        return lines.key({"comparison": comparison, "policy": policy, "case": case, **read})

    def _key_of(self, line: Line) -> str:
        """Key that this plan gives a line's measurement. The one in the line is of the plan that it was made by."""
        comparison = self._comparison(line["task"], line.get("task_settings"), line)
        return self._key(comparison, line.get("policy_settings"), line.get("policy_files"), line["case"])

    def line(self, name: str, case: Case, contender: Contender, outcome: Outcome, model: Model | LoadedWeights) -> Line:
        """JSON line of one measurement."""
        task = self.tasks[name]
        comparison = self._comparison(name, task.settings, self.about)
        return {
            "task": name,
            "policy": contender.label,
            "budget": contender.budget,
            "once": contender.once,
            "case": case,
            "score": outcome.score,
            "seen_share": outcome.seen_share,
            "metric": task.metric.name,
            "weight": outcome.weight,
            **asdict(outcome.kv),
            "ttft_s": outcome.ttft_s,
            "tpot_s": outcome.tpot_s,
            "details": outcome.details,
            "policy_settings": contender.settings,
            "policy_files": contender.files,
            "task_settings": task.settings,
            "key": self._key(comparison, contender.settings, contender.files, case),
            "comparison": comparison,
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "date": self.date,
            "commit": self.commit,
            **self.about,
        }


def _with_full(
    chosen: list[Contender], tasks: Iterable[Task], num_layers: int
) -> tuple[list[Contender], Sequence[str]]:
    """The policies with the full cache, which all are compared with, and a sentence if it was not among them.

    It stays out where a task cannot be done with it, as a text that is longer than the model has positions.
    """
    if any(contender.label == summary.FULL for contender in chosen):
        return chosen, ()
    [full] = contenders([summary.FULL], [])
    try:
        for task in tasks:
            task.check(full, num_layers)
    except ValueError as error:
        return chosen, (f"policies= lacks full, which cannot be measured here: {error}",)
    return [full, *chosen], ("full was added to policies=, since over full compares with it",)


def model_options(options: ModelOptions, adapters: Sequence[str] = ()) -> str:
    """Options of the model in the form that lines have. One that came later is left out while it has its default.

    Args:
        adapters: digests of its adapters, which stand in the place of their paths.
    """
    defaults = type(options)()
    given = {each.name: getattr(options, each.name) for each in fields(options)} | {"adapter": list(adapters)}
    told = (
        f"{name}={value!r}"
        for name, value in given.items()
        if name in FIRST_MODEL_OPTIONS or value != getattr(defaults, name, None)
    )
    return f"ModelOptions({', '.join(told)})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
