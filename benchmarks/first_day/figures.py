"""Findings of a part as it goes: one JSON line each in a file, which the page is made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor.findings import Finding, Verdict
from benchmarks.first_day.estimates import ESTIMATES, RANGE, GPUFigures
from runahead.failures import first_line

MOST_CHARACTERS = 200
"""Beginning of an error's line that is kept."""

Line = dict[str, Any]
"""A finding's fields, and of a figure its value, its unit and its estimate."""


class Figures:
    """Takes down what a part finds.

    Args:
        path: file to append to; None writes nothing, on all ranks but the first.
        machine: the GPU's figures, for estimates; None on a CPU.
    """

    def __init__(self, part: str, path: Path | None, machine: GPUFigures | None) -> None:
        self.part, self._path, self.machine = part, path, machine

    def note(self, name: str, value: float, kind: str, *sizes: float) -> None:
        """Take down a measured figure beside its estimate.

        Args:
            kind: key of `ESTIMATES`; or a unit, for a figure that nothing is known of.
            sizes: what the estimate depends on.
        """
        estimate = ESTIMATES.get(kind)
        unit = kind if estimate is None else estimate.unit
        expected = None if estimate is None or self.machine is None else estimate.of(self.machine, *sizes)
        verdict, words = Verdict.noted, ""
        if estimate is not None and expected is not None:
            off = max(value, 0.0) / expected
            is_near = 1 / RANGE <= off <= RANGE
            verdict = Verdict.good if is_near else Verdict.short
            words = "" if is_near else f"{off:.2g} times the estimate, which assumes: {estimate.because}"
        self.found(
            Finding(
                group=self.part,
                name=name,
                verdict=verdict,
                measured=f"{value:,.4g} {unit}",
                bound="" if expected is None else f"about {expected:,.3g} {unit}",
                words=words,
            ),
            {"value": value, "unit": unit, "expected": expected},
        )

    def check(self, name: str, holds: bool, *, otherwise: str, measured: str = "") -> None:
        """Take down whether something holds that must.

        Args:
            otherwise: what it means if it does not.
        """
        verdict, words = (Verdict.good, "") if holds else (Verdict.failed, otherwise)
        self.found(Finding(group=self.part, name=name, verdict=verdict, measured=measured, words=words))

    def attempt(self, name: str, call: Callable[[], object], *, is_ours: bool = True) -> None:
        """Call what takes down figures. If that fails the part goes on, with a finding.

        Args:
            is_ours: the runtime needs it; else a failure is noted only, as it is when the GPU has no memory for it.
        """
        try:
            call()
        except Exception as error:  # whatever a kernel raises on a machine that we have not seen
            is_too_large = isinstance(error.__cause__ or error, torch.OutOfMemoryError)
            verdict = Verdict.failed if is_ours and not is_too_large else Verdict.noted
            words = f"{type(error).__name__}: {first_line(error)[:MOST_CHARACTERS]}"
            self.found(Finding(group=self.part, name=name, verdict=verdict, words=words))

    def found(self, finding: Finding, more: Line | None = None) -> None:
        """Take down a finding, in the part's group."""
        line = finding.as_json() | {"group": self.part} | (more or {})
        print(as_line(line), flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def as_line(line: Line) -> str:
    """A finding on one line of text."""
    told = ", ".join(filter(None, [line["measured"], line["bound"] and f"against {line['bound']}", line["words"]]))
    return f"{line['group']}: {line['name']}: {line['verdict']}{told and f' ({told})'}"


def finding_of(line: Line) -> Finding:
    """The finding of a line that `Figures` wrote."""
    names = ("group", "name", "measured", "bound", "words")
    return Finding(verdict=Verdict[line["verdict"]], **{name: line[name] for name in names})
