"""An evaluation from its options to its report: what launch/evaluate.py does on its rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from benchmarks.evaluation import plot, summary
from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.plan import Plan, Step
from benchmarks.evaluation.tasks.answering import prefilled
from benchmarks.evaluation.tasks.base import Runtime
from benchmarks.harness import lines
from benchmarks.harness.lines import Line
from launch.inputs.text_files import EXAMPLE_TEXT
from launch.program.ending import say
from launch.program.progress import Bar
from launch.program.text_table import text_table
from runahead.config import GenerationOptions
from runahead.files import write_whole
from runahead.model.shares import load_model
from runahead.ranks.ranks import Ranks


def evaluate(run: EvaluateRun, ranks: Ranks) -> None:
    """Make the missing measurements, print and write the results and draw the pictures.

    Raises:
        ValueError, OSError: for a user's mistakes.
    """
    plan = ranks.on_rank_0("the evaluation's options", lambda: Plan.from_options(run, ranks))
    missing = plan.missing()
    if not missing:
        say(f"nothing to do: {run.lines} has all of it; remove it to measure again")
    found = []
    for line in measured(run, ranks, plan, missing):
        if run.lines is not None:
            lines.append(run.lines, [line])
        found.append(line)
    found = plan.select([*plan.done, *found])
    rows = summary.rows(found)
    for name, of_task in groupby(rows, key=lambda row: row.task):
        print(f"{name}\n{text_table(summary.table(list(of_task)))}", flush=True)
    for note in [*plan.notes, *summary.notes(rows, run.lines)]:
        print(note, flush=True)
    if run.report is not None:
        _write(run, run.report, plan, found)


def measured(run: EvaluateRun, ranks: Ranks, plan: Plan, missing: Sequence[Step]) -> Iterator[Line]:
    """Make the missing measurements: the line of each."""
    if not missing:
        return
    model = load_model(run.model, ranks)
    for contender in plan.contenders:
        contender.check(model)
    runtime = Runtime(model=model, ranks=ranks)
    _warm_up(runtime, plan.contenders)
    for name in dict.fromkeys(name for name, _, _ in missing):
        plan.tasks[name].prepare(runtime, [line for line in plan.select(plan.done) if line["task"] == name])
    num_done = 0
    with Bar("evaluating", shown=ranks.rank == 0) as bar:
        bar.total = sum(plan.tasks[name].cost(case) for name, case, _ in missing)
        for (name, case), steps in groupby(missing, key=lambda step: step[:2]):
            task, together = plan.tasks[name], [contender for _, _, contender in steps]
            case_text = ", ".join(f"{field} {value}" for field, value in case.items())
            told = f"{name} {case_text}, {len(together)} policies"
            bar.say(f"measurement {num_done + 1} of {len(missing)}: {told}")
            for contender, outcome in task.run_all(runtime, together, case):
                yield plan.line(name, case, contender, outcome, model)
                num_done += 1
                bar.advance(task.cost(case))
                bar.say(f"measurement {min(num_done + 1, len(missing))} of {len(missing)}: {told}")


def _warm_up(runtime: Runtime, contenders: Sequence[Contender]) -> None:
    """Generate a few tokens under every policy, so that no measurement includes one-time costs."""
    for contender in contenders:
        [(_, conversation, _)] = prefilled(runtime, [contender], [0] * 8, length=10)
        conversation.generate(GenerationOptions(max_new_tokens=2, ignore_eos=True))


def _write(run: EvaluateRun, path: str, plan: Plan, found: Sequence[Line]) -> None:
    """Write the report and the pictures beside it."""
    pictures = plot.draw(found, path)
    report = {
        "model": found[-1]["model"],
        "dtype": found[-1]["dtype"],
        "text": run.text.file or EXAMPLE_TEXT,
        "tasks": {name: task.settings for name, task in plan.tasks.items()},
        "results": [row.as_json() for row in summary.rows(found)],
        "lines": run.lines,
        "pictures": [picture.name for picture in pictures],
        "commit": plan.commit,
        "date": plan.date,
        **plan.about,
    }
    write_whole(path, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
