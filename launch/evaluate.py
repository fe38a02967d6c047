"""Measure the cost of cache policies in quality, bytes and time: `python launch/evaluate.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: the packages are beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.evaluation.options import TASK_NAMES, EvaluateRun, ineffective_settings
from launch.inputs.text_files import EXAMPLE_TEXT, text_or_example
from launch.program.compose import Program
from launch.program.ending import say
from launch.program.run import run_program

if TYPE_CHECKING:
    from benchmarks.evaluation.contenders import Contender
    from benchmarks.evaluation.record import Record
    from benchmarks.evaluation.tasks import Task
    from benchmarks.evaluation.tasks.base import Case, Runtime
    from benchmarks.harness.lines import Line
    from runahead.ranks.ranks import Ranks

HELP = f"""\
usage: python launch/evaluate.py [name=value ...]     (one rank)

Measures cache policies under budgets in several tasks, each against the full cache: quality, bytes of the KV cache,
time to first token and time per token. Prints a table per task, writes a JSON report, and draws quality over the share
that is kept, retrieval by depth, and what each layer keeps.

  policies=[full,pyramidinfer,snapkv]   names, or {{name:snapkv,window:64}}; one with a budget among its options, as
                                        {{name:window,budget:256}}, runs under that one
  budgets=[0.2,0.5,0.8]                 shares of the prompt (pyramidinfer's mean_keep), or tokens if whole numbers
  tasks=[perplexity,copy,passkey]       of {", ".join(TASK_NAMES)}
  text.file=<text in UTF-8>             for perplexity, copy and needle; by default {EXAMPLE_TEXT}

  perplexity   perplexity.tokens=2048   perplexity.samples=1   perplexity.chunk=256
               of text that is read in chunks, each with what was kept of those before it
  copy         copy.passage=128   copy.filler=640   copy.samples=4
               NLL of a passage that has been read before, with other text between
  passkey      passkey.lengths=[512,1024,2048]   passkey.depths=[0,0.25,0.5,0.75,1]   passkey.samples=1
               passkey.question=separate|with_context   passkey.new_tokens=8
               a number in text that repeats itself; the question is a turn of its own after the thinned context
  needle       needle....: as passkey, in the text of text.file
  throughput   throughput.prompt_tokens=512   throughput.new_tokens=256   throughput.kv_tokens=6144 (or .kv_bytes)
               throughput.max_batch=64   throughput.rounds=3
               tokens/s with the largest batch whose KV cache fits

  model=smollm2|hf|random   model.path=...   model.config=...   model.dtype=...
  ranks.device=auto|cuda|cpu   ranks.threads=<n>
  report=<json>   lines=<jsonl>

Started again after an interruption it goes on from its lines. python -m benchmarks.evaluation.plot draws and tabulates
them again.
"""

EVALUATE = Program(module="launch.evaluate", options=EvaluateRun, help=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    return run_program(EVALUATE, args, evaluate, warnings=ineffective_settings)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All measurements of an evaluation, known before the model is loaded.

    Attributes:
        contenders: policies under their budgets.
        tasks: tasks by name.
        record: what every line says of this evaluation.
        done: lines of measurements made before.
    """

    contenders: list[Contender]
    tasks: dict[str, Task]
    record: Record
    done: list[Line]

    def missing(self) -> list[tuple[str, Case, Contender]]:
        """Measurements that no line has yet. All policies take turns in a case, so that load affects all of them."""
        known = {line["key"] for line in self.done}
        return [step for step, key in self._steps() if key not in known]

    def of(self, found: Sequence[Line]) -> list[Line]:
        """Lines of this plan, in its order."""
        by_key = {line["key"]: line for line in found}
        return [by_key[key] for _, key in self._steps() if key in by_key]

    def _steps(self) -> list[tuple[tuple[str, Case, Contender], str]]:
        return [
            ((name, case, contender), self.record.key(name, task, contender, case))
            for name, task in self.tasks.items()
            for case in task.cases
            for contender in self.contenders
        ]


def evaluate(run: EvaluateRun, ranks: Ranks) -> list[Line]:
    """Make the missing measurements, print and write the results and draw the pictures. Returns the lines.

    Raises:
        ValueError, OSError: for a user's mistakes.
    """
    from itertools import groupby

    from benchmarks.evaluation import summary
    from launch.program.text_table import text_table

    plan = ranks.on_rank_0("the evaluation's options", lambda: _prepare(run, ranks))
    missing = plan.missing()
    if not missing:
        say(f"nothing to do: {run.lines} has all of it; remove it to measure again")
    found = [*plan.done, *_measure(run, ranks, plan, missing)]
    found = plan.of(found)
    rows = summary.rows(found)
    for name, of_task in groupby(rows, key=lambda row: row.task):
        print(f"{name}\n{text_table(summary.table(list(of_task)))}", flush=True)
    if run.report is not None:
        _write(run, plan, found)
    return found


def _prepare(run: EvaluateRun, ranks: Ranks) -> Plan:
    """Check the options and the text, and plan the measurements, before the model is loaded."""
    import torch

    from benchmarks.evaluation.contenders import contenders
    from benchmarks.evaluation.material import Material, Text
    from benchmarks.evaluation.plot import read
    from benchmarks.evaluation.record import Record
    from benchmarks.evaluation.tasks import TASKS
    from runahead.files import ensure_writable
    from runahead.model import loading
    from runahead.model.model import max_positions

    if ranks.size > 1:
        raise ValueError(
            f"policies are evaluated on one rank but {ranks.size} were started; use python launch/evaluate.py"
        )
    chosen = contenders(run.policies, run.budgets)
    for option, path in (("report", run.report), ("lines", run.lines)):
        if path is not None:
            ensure_writable(path, option=option)
    done = [] if run.lines is None else read(Path(run.lines))
    kinds = {name: TASKS[name] for name in run.tasks}
    text = None
    if any(kind.needs_text for kind in kinds.values()):
        name, content = text_or_example(run.text.file, "text.file")
        text = Text(name=name, content=content)
    config = loading.load_config(run.model, progress=True).get_text_config(decoder=True)
    tokenizer = loading.load_tokenizer(run.model)
    speechless = [name for name, kind in kinds.items() if kind.needs_tokenizer]
    if tokenizer is None and speechless:
        raise ValueError(
            f"tasks has {', '.join(speechless)}, which needs a tokenizer, and this model has none; use tasks=throughput"
        )
    material = Material(
        tokenizer=tokenizer, vocab_size=config.vocab_size, max_positions=max_positions(config), text=text
    )
    num_threads = None if ranks.device.type == "cuda" else torch.get_num_threads()
    tasks = {name: kind(run, material) for name, kind in kinds.items()}
    for task in tasks.values():
        for contender in chosen:
            task.check(contender, config.num_hidden_layers)
    return Plan(
        contenders=chosen,
        tasks=tasks,
        record=Record.of(run, ranks, config, text, num_threads),
        done=done,
    )


def _measure(run: EvaluateRun, ranks: Ranks, plan: Plan, missing: list[tuple[str, Case, Contender]]) -> list[Line]:
    """Make the missing measurements and write the line of each at once."""
    from benchmarks.evaluation.tasks.base import Runtime
    from benchmarks.harness import lines
    from launch.program.progress import Bar
    from runahead.model.model import Model

    if not missing:
        return []
    model = Model.load(run.model, ranks.device, progress=True)
    for contender in plan.contenders:
        contender.policies.check(model)
    runtime = Runtime(model=model, ranks=ranks)
    _warm_up(runtime, plan)
    found: list[Line] = []
    with Bar("evaluating", shown=ranks.rank == 0) as bar:
        bar.total = sum(plan.tasks[name].cost(case) for name, case, _ in missing)
        for number, (name, case, contender) in enumerate(missing, start=1):
            task = plan.tasks[name]
            bar.say(f"{number} of {len(missing)}: {name} {_case_text(case)}, {contender.name}")
            outcome = task.run(runtime, contender, case)
            line = plan.record.line(
                name, task, contender, case, outcome, model=model.name, dtype=str(model.dtype).removeprefix("torch.")
            )
            if run.lines is not None:
                lines.append(run.lines, [line])
            found.append(line)
            bar.advance(task.cost(case))
    return found


def _warm_up(runtime: Runtime, plan: Plan) -> None:
    """Generate a few tokens under every policy, so that no measurement includes one-time costs."""
    import torch

    from runahead.config import GenerationOptions
    from runahead.conversation import Conversation

    for contender in plan.contenders:
        conversation = Conversation(runtime.model, contender.policies)
        conversation.feed(torch.zeros(1, 8, dtype=torch.long))
        conversation.generate(GenerationOptions(max_new_tokens=2, ignore_eos=True))


def _case_text(case: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items())


def _write(run: EvaluateRun, plan: Plan, found: Sequence[Line]) -> None:
    """Write the report and the pictures beside it."""
    import json

    from benchmarks.evaluation import plot, summary
    from runahead.files import write_whole

    assert run.report is not None
    written = plot.draw(found, Path(run.report).with_suffix(""))
    report: dict[str, Any] = {
        "model": found[-1]["model"],
        "dtype": found[-1]["dtype"],
        "text": run.text.file or EXAMPLE_TEXT,
        "tasks": {name: task.settings for name, task in plan.tasks.items()},
        "results": [row.as_json() for row in summary.rows(found)],
        "lines": run.lines,
        "pictures": [path.name for path in written],
        "commit": plan.record.commit,
        "date": plan.record.date,
        **plan.record.about,
    }
    write_whole(run.report, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
