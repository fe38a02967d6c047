"""Runs of the programs that learn something about a model, inside a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import duo_gates, fit_kvzap, retrieval_heads, skew
from tests.exit_status import exit_status

PROGRAMS: dict[str, tuple[Any, list[str]]] = {
    "skew": (skew, ["sample={sample}", "tokens=96", "chunk=40"]),
    "retrieval_heads": (retrieval_heads, ["tokens=20"]),
    "duo_gates": (
        duo_gates,
        ["sample={sample}", "tokens=160", "sinks=2", "recent=8", "passkeys=1", "words=4", "steps=2"],
    ),
    "fit_kvzap": (fit_kvzap, ["samples=['{sample}']", "context=96"]),
}
"""Modules of the programs by name, with options of a short run."""


def ended(name: str, folder: Path, sample: Path, out: Path, *more: str) -> int:
    """Exit status of a program that reads a model from its folder, and a text."""
    program, short = PROGRAMS[name]
    given = ["model=hf", f"model.path={folder}", f"out={out}", "ranks.threads=1", "ranks.device=cpu"]
    return exit_status(program.main, [*given, *(each.format(sample=sample) for each in short), *more])
