"""How a program says what went wrong, and ends: one line, a status, and no waiting for a broken process group."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch.program.compose import this_rank
from launch.program.signals import Terminated, signals_ignored
from runahead.failures import PeerFailure, SharedError, first_line

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

ENDED_BY = "ended by "
NO_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
"""What PyTorch, C++ and Python say when memory runs out."""

_one_at_a_time = threading.Lock()
"""The main thread and one that finds it stuck may end at the same time: the first does, the second never goes on."""


def say(message: str) -> None:
    """A line on standard error, once per job."""
    if this_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def end_with(error: BaseException, ranks: Ranks | None, fault_file: Path | None = None) -> NoReturn:
    """Say in one line why this rank ends, tell the others, and leave at once.

    At once: the threads of a broken process group may hang for ever, and Python would wait for them.

    Args:
        fault_file: where to write what this rank knows, unless the error is a user's mistake.
    """
    with _one_at_a_time, signals_ignored():
        status = 1
        try:
            status = _tell(error, ranks, fault_file)
            if os.environ.get("RUNAHEAD_TRACEBACK") == "1":
                traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever telling meets: no memory, no reader
            os._exit(status)


def _tell(error: BaseException, ranks: Ranks | None, fault_file: Path | None) -> int:
    """The exit status."""
    if isinstance(error, SharedError):
        return 1
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        if ranks is not None:
            ranks.fail("interrupted")
        return 130
    size = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks.size
    label = f"[rank {this_rank()}/{size}] " if size > 1 else ""
    reason = _reason(error, ranks)
    if ranks is not None:
        is_known = isinstance(error, Terminated) and ranks.known_failure() is not None
        if not is_known and not isinstance(error, PeerFailure):
            ranks.fail(reason)
        if fault_file is not None and size > 1 and not isinstance(error, ValueError | OSError):
            reason += _kept(fault_file, ranks, reason)
    print(f"{label}{reason}", file=sys.stderr, flush=True)
    if ranks is not None:
        ranks.kill_silent()
    return 128 + error.number if isinstance(error, Terminated) else 1


def _reason(error: BaseException, ranks: Ranks | None) -> str:
    reason = first_line(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError | PeerFailure):
        return reason
    if isinstance(error, MemoryError) or any(words in reason.lower() for words in NO_MEMORY):
        return f"out of memory ({type(error).__name__}: {reason}); use more ranks, a shorter prompt or fewer at once"
    if not isinstance(error, Terminated):
        return f"{type(error).__name__}: {reason}"
    # A launcher ends all ranks as soon as one has ended: which one is what its user wants to know.
    wait = None if ranks is None else ranks.waiting_for
    where = "" if wait is None else f" while waiting for {wait.describe()}"
    cause = None if ranks is None else ranks.known_failure()
    return f"{reason}{where}" if cause is None or ENDED_BY in cause else f"{cause}; {reason}{where}"


def _kept(fault_file: Path, ranks: Ranks, reason: str) -> str:
    """Write the fault report; what the line is to say of it."""
    from runahead.ranks.fault_report import write_fault_report

    with suppress(Exception):  # the line matters more, and a full disk or no memory may be what went wrong
        write_fault_report(fault_file, ranks, reason)
        return f"; see {fault_file.name}"
    return ""
