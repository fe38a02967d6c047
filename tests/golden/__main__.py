"""Records the golden set, or compares the code with it.

python -m tests.golden record    # what differs or is missing; prints it. The code has to be committed.
python -m tests.golden check     # prints what differs
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness.machine import DIRTY, commit
from tests.conftest import RankPools
from tests.golden.combinations import Combination, covering
from tests.golden.comparing import (
    answers_of,
    differences,
    differing,
    largest_difference,
    root_mean_square,
)
from tests.golden.records import INDEX, NUMBERS, Record, load, name_of, save
from tests.golden.running import Answer, Noise

LEAST_MARGIN = 1e-6
NOISE, NOISE_IN_FEW_BITS = 1e-6, 1e-9
"""Relative noise on the weights that may flip no choice. Of many numbers that are rounded to few bits, some are as
close to a step as 1e-6."""
MOST_SENSITIVE = 1e3
"""Measured where no choice flips: 50 to 300."""
SEEDS, ROUNDS = 50, 5


def main(args: Sequence[str]) -> int:
    if args[:1] == ["check"] and len(args) <= 2:
        return _check(*(Path(each) for each in args[1:]))
    if list(args) == ["record"]:
        return _record()
    print(__doc__, file=sys.stderr)
    return 2


def _check(folder: Path | None = None) -> int:
    """Print which records the code does not reproduce, a line each."""
    place = [INDEX, NUMBERS] if folder is None else [folder / INDEX.name, folder / NUMBERS.name]
    differ = 0
    with closing(RankPools()) as pools:
        for record in load(*place):
            why = differing(answers_of(pools.run, record.combination, record.seed), record)
            if why is not None:
                differ += 1
                print(f"{record.name}: {why}", flush=True)
    return int(differ > 0)


def _record() -> int:
    if (commit() or DIRTY).endswith(DIRTY):
        print("the golden set is recorded by committed code; commit the changes first", file=sys.stderr)
        return 1
    records = load()
    try:
        with closing(RankPools()) as pools:
            _complete(pools, records)
    finally:  # what was recorded before an error is not recorded again
        if records:
            save(records)
    return 0


def _complete(pools: RankPools, records: list[Record]) -> None:
    """Record what differs or is missing, in place."""

    def is_allowed(combination: Combination) -> bool:
        return not isinstance(answers_of(pools.run, combination, 0), str)

    for place, each in enumerate(records):
        records[place] = _again(pools, each)
    for combination in covering([each.combination for each in records], is_allowed):
        records.append(_recorded(pools, combination))
        _tell("new", records[-1])
    for _ in range(ROUNDS):
        unsure = _not_on_every_cpu(records)
        if not unsure:
            return
        for place, each in enumerate(records):
            if each.name in unsure:
                records[place] = _recorded(pools, each.combination, each.seed + 1)
    raise AssertionError(f"these differ with ATEN_CPU_CAPABILITY=default, whatever the seed: {unsure}")


def _again(pools: RankPools, known: Record) -> Record:
    """A record as it is, if the code still reproduces it, or a new one."""
    why = differing(answers_of(pools.run, known.combination, known.seed), known)
    if why is None:
        return known
    print(f"changed: {known.name}: {why}", flush=True)
    return _recorded(pools, known.combination, known.seed)


def _recorded(pools: RankPools, combination: Combination, seed: int = 0) -> Record:
    """A record of the first seed from this one on that is not close to another choice or token."""
    for each in range(seed, seed + SEEDS):
        found = answers_of(pools.run, combination, each)
        assert not isinstance(found, str), f"{name_of(combination)}: {found}"
        margin = min(answer.margin for answer in found)
        if margin >= LEAST_MARGIN and (most := _sensitivity(pools, combination, each, found)) <= MOST_SENSITIVE:
            record = Record(combination=combination, seed=each, answers=found, margin=margin, sensitivity=most)
            return replace(record, bfloat16_error=bfloat16_error(pools, record) if in_bfloat16(record) else None)
    raise AssertionError(f"{name_of(combination)}: no prompt is far enough from other choices")


def _tell(what: str, record: Record) -> None:
    seed, margin, most = record.seed, record.margin, record.sensitivity
    print(f"{what}: {record.name} (seed {seed}, margin {margin:.1e}, sensitivity {most:.0f})", flush=True)


def _sensitivity(pools: RankPools, combination: Combination, seed: int, found: list[Answer]) -> float:
    size, most = NOISE if combination["bits"] == "none" else NOISE_IN_FEW_BITS, 0.0
    for direction in (1, -1, 2, -2):
        noisy = answers_of(pools.run, combination, seed, torch.float64, Noise(size=size, seed=direction))
        assert not isinstance(noisy, str), noisy
        most = max(most, largest_difference(noisy, found) / size)
    return most


def in_bfloat16(record: Record) -> bool:
    """Whether its error in bfloat16 tells something: without choices, of tokens or experts, that would flip."""
    return record.combination["policy"] == "none" and record.combination["family"] not in ("gpt_oss", "deepseek_v3")


def bfloat16_error(pools: RankPools, record: Record) -> float:
    found = answers_of(pools.run, record.combination, record.seed, torch.bfloat16)
    assert not isinstance(found, str), found
    return root_mean_square(differences(found, record.answers))


def _not_on_every_cpu(records: Sequence[Record]) -> set[str]:
    """Names of records that kernels for any CPU do not reproduce."""
    with tempfile.TemporaryDirectory() as folder:
        save(records, Path(folder) / INDEX.name, Path(folder) / NUMBERS.name)
        command = [sys.executable, "-m", "tests.golden", "check", folder]
        done = subprocess.run(
            command, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"}, capture_output=True, text=True
        )
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    found = {
        each.name for each in records if any(line.startswith(f"{each.name}: ") for line in done.stdout.split("\n"))
    }
    assert done.returncode == bool(found), done.stderr
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
