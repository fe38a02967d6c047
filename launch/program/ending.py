"""End of a program: what a failing one says, its fault report and exit status, and how a rank leaves its job."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch.program.launcher import this_rank
from launch.program.signals import Terminated, signals_ignored
from runahead.failures import PeerFailure, SharedError, first_line

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

ENDED_BY = "ended by "
NO_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
"""Words of the errors that PyTorch, C++ and Python raise when memory runs out."""

_one_at_a_time = threading.Lock()
"""Held by the thread that ends the process: either the main thread, or the one that finds it stuck."""


def say(message: str) -> None:
    """Print a line on standard error, on rank 0 only."""
    if this_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def leave(status: int) -> NoReturn:
    """End this process with the exit status of its program. A rank of a job does not wait for Python to be taken down.

    The threads of Gloo's process groups are still there. If Python is taken down under them, the process now and then
    aborts ("terminate called without an active exception": once or twice in some hundred jobs on a busy machine), and a
    job whose answer is there counts as failed.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    atexit._run_exitfuncs()
    with suppress(OSError):  # whoever reads it may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def end_with(error: BaseException, ranks: Ranks | None, fault_file: Path | None = None) -> NoReturn:
    """Print one line on why this rank ends, notify the other ranks, and exit without waiting for threads.

    Python would wait for the threads of a broken process group, which may never return.

    Args:
        fault_file: path of the fault report, which is not written for a user's mistake.
    """
    with _one_at_a_time, signals_ignored():
        status = 1
        try:
            status = _tell(error, ranks, fault_file)
            if os.environ.get("RUNAHEAD_TRACEBACK") == "1":
                traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if printing fails, for lack of memory or of a reader
            os._exit(status)


def _tell(error: BaseException, ranks: Ranks | None, fault_file: Path | None) -> int:
    """Print the line, notify the other ranks, and return the exit status."""
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
    # A launcher ends all ranks as soon as one has ended, and the user wants to know which one that was.
    wait = None if ranks is None else ranks.waiting_for
    where = "" if wait is None else f" while waiting for {wait.describe()}"
    cause = None if ranks is None else ranks.known_failure()
    return f"{reason}{where}" if cause is None or ENDED_BY in cause else f"{cause}; {reason}{where}"


def _kept(fault_file: Path, ranks: Ranks, reason: str) -> str:
    """Write the fault report and return what the line says of it."""
    from runahead.ranks.fault_report import write_fault_report

    with suppress(Exception):  # the line must still be printed, and a full disk may be the reason for it
        write_fault_report(fault_file, ranks, reason)
        return f"; see {fault_file.name}"
    return ""
