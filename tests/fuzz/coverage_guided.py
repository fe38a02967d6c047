"""Fuzzing of our own parsers led by coverage, where atheris is installed (it is no dependency).

    python tests/fuzz/coverage_guided.py "prompt cache, schemas" -runs=100000

What follows the target is for libFuzzer, such as -max_total_time=60 or -seed=1. It ends at the first input
that does not end as it should, and keeps it as crash-<digest>.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris

PARSERS = (
    "policies.prompt_cache",
    "partitioner.table.format",
    "partitioner.table.entry",
    "partitioner.searches.record",
    "partitioner.cost.measured",
    "launch.inputs.prompts",
    "benchmarks.harness.lines",
)

with atheris.instrument_imports(include=list(PARSERS)):
    from tests.fuzz import harness, pml, prompts, tables
    from tests.fuzz.fuzzing import checked
    from tests.fuzz.target import Target
    from tests.fuzz.targets import TARGETS


def examples() -> dict[str, tuple[Sequence[bytes], Callable[[bytes], object]]]:
    """Contents to begin with, and the input that a content is made into, by target."""
    as_prompt = prompts.PromptFile
    return {
        "prompt cache, schemas": ([pml.SCHEMA.encode(), pml.SMALL.encode()], bytes),
        "prompt cache, prompts": ([each.encode() for each in pml.PROMPTS], bytes),
        "lookup tables": ([tables.as_json(tables.TABLE)], bytes),
        "records of searches": ([tables.as_json(tables.RECORD)], bytes),
        "measured compute of a search": ([tables.as_json(tables.MEASURED)], bytes),
        "lines of benchmarks": ([tables.as_lines(tables.BENCH_LINES)], bytes),
        "prompt files, a prompt per line": (prompts.LINES, as_prompt),
        "ids files": ([tables.as_json(ids) for ids in prompts.IDS], as_prompt),
    }


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    known = examples()
    if name not in known:
        raise SystemExit(f"{name!r} is not one of {', '.join(known)}")
    contents, made = known[name]
    target: Target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="runahead-fuzz-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, content in enumerate(contents):
            (corpus / str(number)).write_bytes(content)

        def one(data: bytes) -> None:
            problems = checked(target, made(data), Path(folder) / "input").problems
            if problems:
                raise AssertionError("; ".join(problems))

        atheris.Setup([sys.argv[0], f"-timeout={harness.LIMIT_S:.0f}", *options, os.fspath(corpus)], one)
        with patch.object(harness, "time_limit", lambda seconds: nullcontext()):  # the alarm is libFuzzer's
            atheris.Fuzz()


if __name__ == "__main__":
    main()
