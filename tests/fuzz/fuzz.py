"""Fuzzing of all that reads a file or a string: inputs are taken and usable, or refused in one line.

    python tests/fuzz/fuzz.py --seed 1 --count 12000

Runs in one process. Appends a JSON line per batch to benchmarks/results/fuzz.jsonl and goes on there where it was
interrupted; then writes the table into docs/studies/reliability.md. `--only "lookup tables"` runs one target, and shows
what its users are told; nothing is recorded.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm import tqdm

from benchmarks.harness import lines as json_lines
from benchmarks.harness import machine
from benchmarks.harness.machine import commit, hardware
from benchmarks.harness.study import errors_in_one_line
from policies.prompt_cache import model_text
from runahead.files import write_whole
from runahead.report import library_versions
from tests.fuzz.fuzzing import Batch, run_batch
from tests.fuzz.table import with_table
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.jsonl"
PAGE = ROOT / "docs" / "studies" / "reliability.md"

BATCH = 250
"""Inputs between two lines."""

ROOM_BYTES = 8 * 2**30
"""Address space that the process may take beside what it has: an input that asks for more gets an error."""

STUCK_S = 600.0
"""After so many seconds in one batch that does not heed its own limit, the process says where it stands, and ends."""


def main(args: Sequence[str] | None = None) -> int:
    """0 if all inputs of this seed ended as they should, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=12_000, help="inputs at all targets together")
    parser.add_argument("--only", choices=list(TARGETS), help="this target alone; nothing is recorded")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dirty", action="store_true", help="run for benchmarks/results with uncommitted changes")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(args)
    if options.only is None and not options.dirty:
        with errors_in_one_line():
            machine.require_known_code(options.results, remedy="--dirty or other --results")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "0"  # that nothing is fetched is for the readers to see to
    limit_memory()
    model_text.LIMIT_S = 2.0
    with tempfile.TemporaryDirectory(prefix="runahead-fuzz-") as folder:
        if options.only is not None:
            return alone(TARGETS[options.only], options.seed, options.count, Path(folder))
        known = json_lines.read(options.results, option="--results", kind="target")
        done = {(line["target"], line["batch"]): line for line in known if line["seed"] == options.seed}
        plan = [step for step in planned(options.count) if (step[0].name, step[1]) not in done]
        # miniters: else a thread of its own writes to standard error, which is looked at meanwhile.
        with tqdm(total=sum(count for _, _, count in plan), unit="input", mininterval=1.0, miniters=1) as bar:
            for target, number, count in plan:
                bar.set_postfix_str(target.name)
                batch = watched_batch(target, options.seed, number, count, Path(folder), bar)
                line = recorded(target, options.seed, number, batch)
                json_lines.append(options.results, [line])
                for problem in batch.problems:
                    bar.write(f"{target.name}, batch {number}: {problem}")
    ours = [each for each in json_lines.read(options.results, kind="target") if each["seed"] == options.seed]
    if options.page.exists():
        write_whole(options.page, with_table(options.page.read_text(encoding="utf-8"), ours))
    return 1 if any(line["wrong"] for line in ours) else 0


def planned(count: int) -> list[tuple[Target, int, int]]:
    """Targets with numbers of batches and their inputs, as many as the target's share of `count`."""
    total = sum(target.share for target in TARGETS.values())
    plan = []
    for target in TARGETS.values():
        left, number = -(-count * target.share // total), 0
        while left > 0:
            plan.append((target, number, min(BATCH, left)))
            left, number = left - BATCH, number + 1
    return plan


def alone(target: Target, seed: int, count: int, folder: Path) -> int:
    """One target; what its users are told, by how often."""
    problems, lines, wrong = [], Counter[str](), 0
    with tqdm(total=count, unit="input", mininterval=1.0, miniters=1) as bar:
        for number in range(-(-count // BATCH)):
            batch = watched_batch(target, seed, number, min(BATCH, count - number * BATCH), folder, bar)
            problems += batch.problems
            lines.update(batch.lines)
            wrong += batch.wrong
    for line, times in lines.most_common():
        print(f"{times:6} {line}")
    print(f"{wrong} of {count} did not end as they should")
    for problem in problems:
        print(problem)
    return 1 if wrong else 0


def watched_batch(target: Target, seed: int, number: int, count: int, folder: Path, bar: Any) -> Batch:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    try:
        return run_batch(
            target,
            seed_number=seed,
            number=number,
            count=count,
            folder=folder / "input",
            on_input=bar.update,
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def recorded(target: Target, seed: int, number: int, batch: Batch) -> dict[str, Any]:
    about = asdict(batch)
    del about["lines"]
    about |= {"seconds": round(batch.seconds, 2), "slowest_s": round(batch.slowest_s, 3)}
    return {
        "target": target.name,
        "reads": target.reads,
        "seed": seed,
        "batch": number,
        **about,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": library_versions(),
    }


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    sys.exit(main())
