"""Counters of the virtual GPU: kernels that a piece of code launches, and the places where its host waits."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from runahead.ranks.accelerator import NO_DETECTOR, WAITED
from tests.virtual.cuda.captures import CAPTURING, PAGEABLE, refuse_in_capture

ROOT = Path(__file__).parents[3]
LIBRARY = ("runahead", "policies", "partitioner", "benchmarks", "launch")

SYNC_MODES = ("default", "warn", "error")
"""Names of `torch.cuda.set_sync_debug_mode`, by their numbers."""


@dataclass
class Counts:
    """Counts of one `counting`.

    Attributes:
        kernels: launches, by operation.
        waits: by operation and place ("runahead/x.py:12"): the host waits for all that is queued. torch's sync debug
            mode tells of these, but not of a wait for an event or for the device, which are counted as well.
        pageable: copies that do not block, from or to memory that is not page-locked, by operation and place. They
            are no waits for torch, and for CUDA they may be.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    pageable: Counter[tuple[str, str]] = field(default_factory=Counter)


_counting: list[Counts] = []


class _SyncDebug:
    """torch's sync debug mode: 0 says nothing of waits, 1 warns, 2 raises."""

    mode = 0
    has_told = False


@contextmanager
def counting() -> Iterator[Counts]:
    """Context manager that counts what this process asks of the virtual GPU meanwhile, in all threads."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def note_kernel(operation: str) -> None:
    """Count a launch, unless it is captured."""
    if CAPTURING.capture is not None:
        return
    for counts in _counting:
        counts.kernels[operation] += 1


def note_wait(operation: str, *, is_told: bool = True) -> None:
    """Count a wait of the host.

    Args:
        is_told: the sync debug mode finds it.

    Raises:
        RuntimeError: the sync debug mode is "error", or this thread captures a graph.
    """
    refuse_in_capture()
    for counts in _counting:
        counts.waits[operation, caller()] += 1
    if is_told and _SyncDebug.mode == 1:
        warnings.warn(WAITED, stacklevel=2)
    elif is_told and _SyncDebug.mode == 2:
        raise RuntimeError(WAITED)


def note_pageable(operation: str) -> None:
    """Count a copy from or to pageable memory that does not block. Raises: RuntimeError, in a capture."""
    refuse_in_capture(PAGEABLE)
    for counts in _counting:
        counts.pageable[operation, caller()] += 1


def get_sync_debug_mode() -> int:
    """As in torch.cuda."""
    return _SyncDebug.mode


def set_sync_debug_mode(mode: int | str) -> None:
    """As in torch.cuda. It warns once that torch does not find every wait."""
    if not _SyncDebug.has_told:
        warnings.warn(f"{NO_DETECTOR} feature and does not yet detect all synchronizing operations", stacklevel=2)
        _SyncDebug.has_told = True
    _SyncDebug.mode = SYNC_MODES.index(mode) if isinstance(mode, str) else mode


def caller() -> str:
    """The innermost place in the library from which this is called, else in the tests: "runahead/x.py:12"."""
    found, frame = "", sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        path = _place(frame)
        if path.startswith(LIBRARY):
            return path
        found = found or path
        frame = frame.f_back
    return found


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or path.is_relative_to(Path(__file__).parent):
        return ""
    relative = path.relative_to(ROOT)
    return f"{relative.as_posix()}:{frame.f_lineno}" if relative.parts[0] in (*LIBRARY, "tests") else ""
