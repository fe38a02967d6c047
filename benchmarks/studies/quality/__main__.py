"""Quality of cache policies by what they keep: RULER's tasks and losses, paired with the full cache.

    python -m benchmarks.studies.quality --lengths 1024 --samples 20
    python -m benchmarks.studies.quality --model Qwen/Qwen2.5-Coder-0.5B-Instruct --protocols separate with_context
    python -m benchmarks.studies.quality --tasks qa_1 --squad dev-v2.0.json --policies snapkv '{name:quest,fetch:0.1}'
    python -m benchmarks.studies.quality --methods dropping --lengths 2048 --pairs 28 --text wikitext2.txt
    python -m benchmarks.studies.quality --methods retrieving --lengths 4096 --pairs 56 --text wikitext2.txt
    python -m benchmarks.studies.quality --draw-only

Every sample is asked under all policies and budgets, and under the full cache, from one prefill where policies allow
it. With --methods all policies that drop, merge or share, or all that retrieve, are compared by three losses (see
losses.py): of a passage that comes again, of the text that follows, and of one value among many keys. Files of a model
that duo_attention, razor_attention and kvzap need (see methods.py) are looked for in the current folder.

Appends a JSON line per sample, policy and budget to benchmarks/results/quality.jsonl, skipping those that are there
already (as launch/evaluate.py does, whose lines have the same form). From all lines of the file it draws quality.png
and quality_retrieving.png in docs/studies, and writes the tables of docs/studies/quality.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product

from benchmarks.evaluation.evaluate import measured
from benchmarks.evaluation.options import RULER_FILES, RULER_TASKS, EvaluateRun, Question
from benchmarks.evaluation.plan import Plan
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, errors_in_one_line, option
from benchmarks.studies.quality.methods import FAMILIES, override
from benchmarks.studies.quality.pictures import picture
from benchmarks.studies.quality.recall_picture import recall_picture
from benchmarks.studies.quality.tables import tables
from launch.evaluate import EVALUATE
from launch.program.ending import say
from runahead.ranks.ranks import Ranks

KEY_VALUE = "key_value"
TASKS = [*(name for name in RULER_TASKS if name not in RULER_FILES), KEY_VALUE]
"""Tasks that need no file of questions."""
EXPECTED = "{name:expected_attention,epsilon:0.01}"
"""Expected Attention as NVIDIA's leaderboard has it under AdaKV."""
POLICIES = ["snapkv", "pyramidkv", "h2o", "keydiff", "tova", EXPECTED, "streaming_llm", "pyramidinfer"]
RETRIEVING = ["infinigen", "{name:quest,fetch:0.1}", "{name:exact_topk,fetch:0.1}"]


def settings(options: argparse.Namespace) -> Iterator[Variant]:
    """One protocol and length after the other."""
    for protocol, length in product(options.protocols, options.lengths):
        yield {"protocol": protocol, "length": length}


def measure(options: argparse.Namespace, _: None, setting: Variant) -> Iterator[Line]:
    """Measure what the file does not have yet."""
    # Times are ratios to the full cache's, whatever the machine.
    across = ["hardware", "code"] if options.across_code else ["hardware"]
    with errors_in_one_line():
        evaluation = evaluation_of(options, **setting)
        with Ranks.start(evaluation.ranks) as ranks:
            plan = Plan.from_options(evaluation, ranks, across=across)
            # A run that is stopped early has about as many samples of each task.
            missing = sorted(plan.missing(), key=lambda step: step[1]["sample"])
            yield from measured(evaluation, ranks, plan, missing)


def evaluation_of(given: argparse.Namespace, protocol: str, length: int) -> EvaluateRun:
    """The options of launch/evaluate.py for a protocol and a length."""
    tasks = ["copy", KEY_VALUE] if given.methods else given.tasks
    ruler = [name for name in tasks if name in RULER_TASKS]
    others = [name for name in tasks if name not in RULER_TASKS]
    # Options of a task that is not asked for have their defaults.
    asked = []
    if ruler:
        asked += [f"ruler.tasks=[{','.join(ruler)}]", f"ruler.lengths=[{length}]", f"ruler.samples={given.samples}"]
        asked += [f"ruler.new_tokens={'null' if given.new_tokens is None else given.new_tokens}"]
        asked += [f"ruler.question={protocol}"]
    if "copy" in others:
        asked += [f"copy.passage={given.passage}", f"copy.filler={length - given.passage}", "copy.timed=false"]
        asked += [f"copy.following={given.passage}", f"copy.samples={given.samples}"]
    optional = {"text.file": given.text, "ruler.squad": given.squad, "ruler.hotpotqa": given.hotpotqa}
    if given.model is not None:
        optional |= {"model": "hf", "model.path": given.model}
    return EVALUATE.compose(
        [
            f"policies=[{','.join(['full', *policies_of(given)])}]",
            f"budgets=[{','.join(map(str, given.budgets))}]",
            f"tasks=[{','.join([*(['ruler'] if ruler else []), *others])}]",
            *asked,
            f"key_value.samples={given.samples}",
            f"key_value.question={protocol}",
            f"key_value.pairs={'null' if given.pairs is None else [given.pairs]}",
            f"ranks.device={given.device}",
            f"ranks.threads={given.threads}",
            f"lines={given.lines}",
            *(f"{name}={value}" for name, value in optional.items() if value is not None),
        ]
    )


def policies_of(given: argparse.Namespace) -> list[str]:
    """The policies besides the full cache, as values of policies=."""
    if not given.methods:
        policies: list[str] = given.policies
        return policies
    methods = FAMILIES[given.methods]
    for method in methods:
        if not method.is_there:
            say(f"{method.name} is left out: there is no {method.file} here; docs/policies.md says how to make it")
    return [override(entry) for method in methods if method.is_there for entry in method.entries]


STUDY = Study(
    name="quality",
    text=__doc__,
    has="task",
    variants=settings,
    measure=measure,
    table=tables,
    options={
        "model": option(None, "a model on the hub, or a folder; by default SmolLM2-135M-Instruct"),
        "tasks": option(TASKS, "tasks of RULER, and key_value", choices=[*RULER_TASKS, KEY_VALUE]),
        "methods": option(None, "compare all policies of a family by losses of texts and values", choices=[*FAMILIES]),
        "policies": option([*POLICIES, *RETRIEVING], "as policies= of launch/evaluate.py, besides full"),
        "budgets": option([0.1, 0.25, 0.5], "shares of the context that policies which drop tokens keep"),
        "lengths": option([4096], "tokens of context and question together, in RULER's tasks; of a text"),
        "passage": option(64, "tokens of a passage that comes again, and of the text that follows"),
        "samples": option(20, "questions or texts per task and length"),
        "protocols": option(
            ["separate"],
            "whether policies know the question when they choose (with_context) or not (separate)",
            choices=[each.name for each in Question],
        ),
        "new-tokens": option(
            None, "of an answer; by default as published, 0 compares with a right answer alone", type=int
        ),
        "pairs": option(None, "keys of key_value; by default as many as make the full cache answer half", type=int),
        "squad": option(None, "SQuAD 2.0's dev-v2.0.json, for qa_1"),
        "hotpotqa": option(None, "HotpotQA's hotpot_dev_distractor_v1.json, for qa_2"),
        "text": option(None, "text in UTF-8 around the needles; by default that in examples/"),
        "across-code": option(False, "go on from lines of other code too, where no change since affects a result"),
        "device": option("auto", choices=["auto", "cuda", "cpu"]),
        "threads": option(1, "threads of a CPU"),
    },
    pictures={"quality.png": picture, "quality_retrieving.png": recall_picture},
    page="quality.md",
)

if __name__ == "__main__":
    STUDY.main()
