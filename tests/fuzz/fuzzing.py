"""Batches of inputs at a target, the same for the same seed."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.harness import Outcome
from tests.fuzz.target import Target

MOST_PROBLEMS = 20
"""Most problems that are kept of a batch."""


@dataclass(kw_only=True)
class Batch:
    """Outcome of a batch of inputs.

    Attributes:
        problems: the input and what is wrong with what became of it.
        lines: by what a user is told, with figures and quoted values left out, how often; of refused inputs.
    """

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    wrong: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)


def run_batch(
    target: Target,
    *,
    seed_number: int,
    number: int,
    count: int,
    folder: Path,
    on_input: Callable[[], object] = lambda: None,
) -> Batch:
    """So many inputs.

    Args:
        number: of this batch among those of the target.
        folder: is emptied before every input.
    """
    batch = Batch()
    began = time.perf_counter()

    @seed(int.from_bytes(hashlib.sha256(f"{target.name} {seed_number} {number}".encode()).digest()[:8], "big"))
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def one(value: Any) -> None:
        before = time.perf_counter()
        outcome = checked(target, value, folder)
        batch.slowest_s = max(batch.slowest_s, time.perf_counter() - before)
        batch.inputs += 1
        batch.wrong += bool(outcome.problems)
        batch.accepted += outcome.accepted and not outcome.problems
        batch.refused += not outcome.accepted and not outcome.problems
        if outcome.problems and len(batch.problems) < MOST_PROBLEMS:
            batch.problems.append(f"{ascii(value)[:600]}: {'; '.join(outcome.problems)}")
        if not outcome.accepted:
            shape = told_shape(outcome.line, folder)
            batch.lines[shape] = batch.lines.get(shape, 0) + 1
        on_input()

    one()
    batch.seconds = time.perf_counter() - began
    return batch


def checked(target: Target, value: Any, folder: Path) -> Outcome:
    """Give one input to its reader, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return target.check(value, folder)


def told_shape(line: str, folder: Path) -> str:
    """A line without what differs from input to input."""
    shape = line.replace(str(folder), "<folder>")
    shape = "".join("0" if character.isdigit() else character for character in shape)
    while "00" in shape:
        shape = shape.replace("00", "0")
    return shape[:160]
