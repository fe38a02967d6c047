"""Where do the seconds go from the command to the first token of a short prompt?

    python -m benchmarks.studies.start
    python -m benchmarks.studies.start --before ../a/checkout/of/an/earlier/commit --rounds 5

Runs `launch/infer.py prompt.text=Hello generation.max_new_tokens=1` on one rank in this checkout, and in another one in
turn (A B, B A, ...): seconds until the first character of the answer, and processor seconds of the whole process,
which other work on the machine changes less. One more run of each under `python -X importtime` tells what its imports
take, by package, and how many modules there are; that Python writes down each of them makes them slower.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, last_run, option
from benchmarks.studies.commits.job import built_kernels, require_like_kernels

PACKAGES = ("torch", "transformers", "runahead")
OWN = ("launch", "policies", "partitioner", "runahead")
IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| *(\S+)")


def command(options: Namespace, *python: str) -> list[str]:
    """The command whose start is measured."""
    given = ["prompt.text=Hello", f"ranks.threads={options.threads}", *options.given]
    return [sys.executable, *python, "launch/infer.py", *given]


def run(options: Namespace, tree: Path, _: int) -> tuple[float, float]:
    """Seconds to the first character, and processor seconds. Raises: SystemExit: the run fails."""
    began_s = time.perf_counter()
    process = subprocess.Popen(command(options), cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    first_s = time.perf_counter() - began_s
    process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command(options))} in {tree} ended with {process.returncode}")
    return first_s, used.ru_utime + used.ru_stime


def imports(options: Namespace, tree: Path) -> tuple[int, dict[str, float]]:
    """Number of imported modules, and seconds by package."""
    done = subprocess.run(command(options, "-X", "importtime"), cwd=tree, capture_output=True, text=True, check=True)
    seconds, num_modules = defaultdict[str, float](float), 0
    for micros, module in IMPORT.findall(done.stderr):
        package = module.partition(".")[0]
        name = "runahead" if package in OWN else package if package in PACKAGES else "others"
        seconds[name] += int(micros) / 1e6
        num_modules += 1
    return num_modules, dict(seconds)


def variants(options: Namespace) -> Iterator[Variant]:
    yield {"threads": options.threads}


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """A line for each checkout."""
    trees = {"this": ROOT} | ({} if options.before is None else {"before": Path(options.before).resolve()})
    kernels = {name: built_kernels(tree) for name, tree in trees.items()}
    with errors_in_one_line():
        require_like_kernels(kernels)
    turns = {name: partial(run, options, tree) for name, tree in trees.items()}
    found = in_turn(turns, options.rounds, warmup=1, label="starts")
    for name, tree in trees.items():
        num_modules, seconds = imports(options, tree)
        first_s, processor_s = zip(*found[name], strict=True)
        times = {"first_s": list(first_s), "processor_s": list(processor_s)}
        yield variant | {"tree": name, "kernels": kernels[name], "modules": num_modules, "imports": seconds} | times


def _imports_of(name: str) -> Callable[[Line], str]:
    return lambda line: f"{line['imports'].get(name, 0.0):.2f} s"


TABLE = Table(
    lines=last_run,
    columns={
        "checkout": lambda line: line["tree"],
        "threads": lambda line: str(line["threads"]),
        "first token": lambda line: f"{median(line['first_s']):.2f} s",
        "processor": lambda line: f"{median(line['processor_s']):.2f} s",
        "modules": lambda line: f"{line['modules']:,}",
        **{f"{name}, imports": _imports_of(name) for name in (*PACKAGES, "others")},
    },
)

STUDY = Study(
    name="start",
    text=__doc__,
    has="processor_s",
    variants=variants,
    measure=measure,
    table=TABLE,
    options={
        "before": option(None, "another checkout, which is measured in turn"),
        "rounds": option(5, "runs of each checkout"),
        "threads": option(1, "of the rank"),
        "given": option(["generation.max_new_tokens=1"], "options of launch/infer.py"),
    },
)

if __name__ == "__main__":
    STUDY.main()
