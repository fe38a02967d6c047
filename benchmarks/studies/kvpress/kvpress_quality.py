"""Quality under kvpress's methods and under ours of the same definition: RULER's questions, asked on both sides.

    python -m benchmarks.studies.kvpress.kvpress_quality --lengths 1024 --samples 3
    python -m benchmarks.studies.kvpress.kvpress_quality --tasks qa_1 --squad dev-v2.0.json --methods snapkv keydiff
    python -m benchmarks.studies.kvpress.kvpress_quality --model Qwen/Qwen2.5-Coder-0.5B-Instruct --budget 0.25

The questions are those of benchmarks.studies.quality, under its protocol `separate` and with its --new-tokens 0: the
context is prefilled and cut back, then the question comes, then the answer is compared with a right one, or generated
where several strings are right in any order. Both sides
read the same folder of weights and the same token ids, and keep the same number of tokens. The methods and their
options are in methods.py; the full cache on both sides shows whether they compute the same.

Appends a JSON line per question, method and side to benchmarks/results/kvpress_quality.jsonl, skipping those that are
there already, and writes the tables of docs/studies/kvpress.md from all lines of the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.evaluate import measured
from benchmarks.evaluation.options import RULER_FILES, RULER_TASKS, EvaluateRun
from benchmarks.evaluation.plan import Plan, Step
from benchmarks.evaluation.summary import FULL
from benchmarks.evaluation.tasks.answering import Answering, Item, up_to_difference
from benchmarks.evaluation.tasks.base import Case, KVUse, Outcome
from benchmarks.harness import machine
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.studies.kvpress.environment import environment, start, versions
from benchmarks.studies.kvpress.methods import METHODS, WINDOW
from benchmarks.studies.kvpress.paired_sides import tables
from benchmarks.studies.quality.__main__ import ACROSS_CODE, across, evaluation_of
from benchmarks.studies.quality.__main__ import STUDY as QUALITY
from benchmarks.studies.quality.methods import override
from launch.program.progress import Bar
from policies.base import budget_tokens
from runahead.model import loading
from runahead.ranks.ranks import Ranks

MEASURED = ("benchmarks/evaluation", "benchmarks/studies/kvpress")
"""Folders whose code affects kvpress's answers."""


def measure(run: Run) -> Iterator[Line]:
    """Measure what the file does not have yet, for one length after the other, our side first."""
    given = run.options
    for length in given.lengths:
        try:
            require_room(length, given.budget, given.methods)
            evaluation = evaluation_of(replace(run, options=asked(given)), "separate", length)
            with Ranks.start(evaluation.ranks) as ranks:
                plan = Plan.of(evaluation, ranks, across=across(given))
                python = environment()
                names = dict(zip((each.label for each in plan.contenders), [FULL, *given.methods], strict=True))
                for line in measured(evaluation, ranks, plan, by_sample(plan)):
                    yield line | {"method": names[line["policy"]]}
                for line in answered(evaluation, their_plan(plan, versions(python)), names, python):
                    yield line | {"method": names[line["policy"]]}
        except ValueError as error:
            raise SystemExit(str(error)) from error


def require_room(length: int, budget: float, methods: Sequence[str]) -> None:
    """Raises: ValueError: a budget that is no share below 1, or less than SnapKV's window."""
    if not 0 < budget < 1:
        raise ValueError(f"--budget {budget} must be a share of the context above 0 and below 1")
    if any("snapkv" in name for name in methods) and budget * length <= 2 * WINDOW:
        raise ValueError(
            f"--lengths {length} at --budget {budget} leaves SnapKV little more than its window of {WINDOW} tokens; "
            f"use a length above {2 * WINDOW / budget:.0f}"
        )


def asked(given: argparse.Namespace) -> argparse.Namespace:
    """The options of benchmarks.studies.quality that ask the same questions under these methods."""
    options = {"tasks": given.tasks, "policies": [override(METHODS[name].ours) for name in given.methods]}
    options |= {"budgets": [given.budget], "samples": [given.samples], "device": [given.device]}
    options |= {"threads": [given.threads], "lines": [given.lines], "new-tokens": [0]}
    optional = {"model": given.model, "squad": given.squad, "hotpotqa": given.hotpotqa}
    options |= {name: [value] for name, value in optional.items() if value is not None}
    return QUALITY.parser().parse_args(
        [str(each) for name, values in options.items() for each in (f"--{name}", *values)]
    )


def their_plan(plan: Plan, about: dict[str, str]) -> Plan:
    """The same measurements under kvpress, which have keys of their own."""
    return replace(plan, about=plan.about | {"kvpress": about, "code": machine.code(MEASURED)})


def by_sample(plan: Plan) -> list[Step]:
    """Missing measurements in such an order that a run that is stopped early has about as many of each task."""
    return sorted(plan.missing(), key=lambda step: step[1]["sample"])


def answered(run: EvaluateRun, plan: Plan, names: dict[str, str], python: Path) -> Iterator[Line]:
    """Have kvpress answer what is missing: the line of each answer, as soon as it is there.

    Raises:
        ValueError: the model is not in a folder that transformers can read by itself.
        SystemExit: kvpress failed.
    """
    questions = [
        Asked.of(plan, name, case, [contender for *_, contender in group])
        for (name, case), group in groupby(by_sample(plan), key=lambda step: step[:2])
    ]
    if not questions:
        return
    model = loading.load(run.model, device=torch.device("cpu"), attn_implementation="sdpa")
    if not Path(model.path).is_dir():
        raise ValueError(f"--model {model.path} cannot be read by kvpress; give a folder with safetensors weights")
    request = {
        "model": str(Path(model.path).absolute()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": plan.about["device"],
        "threads": torch.get_num_threads(),
        "questions": [each.request(names, run.budgets[0]) for each in questions],
    }
    with tempfile.TemporaryDirectory() as scratch, Bar("kvpress", shown=True) as bar:
        file = Path(scratch) / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        process = start(python, "answered", [file], scratch=scratch)
        assert process.stdout is not None
        bar.total = sum(len(each.contenders) for each in questions)
        try:
            for asked_of, contender in ((each, contender) for each in questions for contender in each.contenders):
                told = f"{asked_of.case['kind']}, sample {asked_of.case['sample']}, {names[contender.label]}"
                bar.say(told)
                answer = process.stdout.readline()
                if not answer:
                    raise SystemExit(f"kvpress ended without an answer to {told}; see its message above")
                outcome = asked_of.outcome(json.loads(answer))
                yield plan.line(asked_of.name, asked_of.case, contender, outcome, model)
                bar.advance(1)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question to kvpress under several methods.

    Attributes:
        name: of its task in the plan.
        ids: token ids of context, question and reference, a right answer; no reference where an answer is generated.
    """

    name: str
    task: Answering
    case: Case
    item: Item
    ids: dict[str, list[int]]
    contenders: list[Contender]

    @classmethod
    def of(cls, plan: Plan, name: str, case: Case, contenders: list[Contender]) -> Asked:
        task = plan.tasks[name]
        assert isinstance(task, Answering), name
        item = task.item(case)
        ids = {"context": item.context, "question": item.question, "reference": task.reference_ids(item)}
        return cls(name=name, task=task, case=case, item=item, ids=ids, contenders=contenders)

    def request(self, names: dict[str, str], budget: float) -> dict[str, Any]:
        """The question as `answered.py` takes it, with the number of tokens that our side keeps."""
        tokens = budget_tokens(budget, len(self.item.context))
        methods = [names[contender.label] for contender in self.contenders]
        presses = [None if method == FULL else METHODS[method].asked(tokens) for method in methods]
        return self.ids | {"new_tokens": self.item.new_tokens, "presses": presses}

    def outcome(self, answer: dict[str, Any]) -> Outcome:
        """An answer of `answered.py`, scored as our side's is."""
        said_ids = answer["greedy"]
        if self.item.reference is not None:
            said_ids = up_to_difference(said_ids, self.ids["reference"])
        said = self.task.material.tokenizer.decode(said_ids, skip_special_tokens=True)
        num_tokens = len(self.item.context)
        kv = KVUse(answer["kv_bytes"], answer["full_kv_bytes"], num_tokens, answer["kept_tokens"])
        return Outcome(
            score=self.task.score(said, self.item),
            seen_share=kv.seen_share_of(None),
            kv=kv,
            ttft_s=answer["prefill_s"] + answer["question_s"],
            tpot_s=None,
            details={
                "answer": said,
                "answers": list(self.item.answers),
                "nll": answer["nll"],
                "question_s": answer["question_s"],
                **self.item.details,
            },
        )


STUDY = Study(
    name="kvpress.kvpress_quality",
    text=__doc__,
    has="task",
    measure=measure,
    table=tables,
    options={
        "model": option(None, "a folder, or a model on the hub; by default SmolLM2-135M-Instruct"),
        "tasks": option([name for name in RULER_TASKS if name not in RULER_FILES], choices=RULER_TASKS),
        "methods": option([*METHODS], "besides the full cache", choices=[*METHODS]),
        "budget": option(0.25, "share of the context that is kept"),
        "lengths": option([1024], "tokens of context and question together"),
        "samples": option(2, "questions per task and length"),
        "squad": option(None, "SQuAD 2.0's dev-v2.0.json, for qa_1"),
        "hotpotqa": option(None, "HotpotQA's hotpot_dev_distractor_v1.json, for qa_2"),
        "across-code": ACROSS_CODE,
        "device": option("cpu", choices=["cuda", "cpu"]),
        "threads": option(1, "threads of a CPU"),
    },
    page="kvpress.md",
)

if __name__ == "__main__":
    STUDY.main()
