"""Targets of the fuzzer: a reader, inputs for it, and what has to be true of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from tests.fuzz.harness import Outcome


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader.

    Attributes:
        name: for the table.
        reads: the function that a program's user gets to it by.
        inputs: valid ones with changes, mostly.
        check: (an input, an empty folder) -> what became of it.
        share: of all inputs, in parts of the sum over targets.
    """

    name: str
    reads: str
    inputs: SearchStrategy[Any]
    check: Callable[[Any, Path], Outcome]
    share: int
