"""End of a program: what a failing one says, its fault report and exit status, and how a rank leaves its job."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launch.program.launcher import this_rank
from launch.program.signals import Terminated, signals_ignored
from runahead.failures import (
    PeerFailure,
    RunFailure,
    SharedError,
    cut_short,
    first_line,
    is_lack_of_memory,
    is_mistake,
    line_of,
    users_place,
)

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

ENDED_BY = "ended by "
MISTAKE = 2
"""Exit status after a mistake in what the user wrote."""

_one_at_a_time = threading.Lock()
"""Held by the thread that ends the process: either the main thread, or the one that finds it stuck."""


def open_closed_streams() -> None:
    """Have what is printed go nowhere where a stream was closed (>&-), as at the start of a daemon.

    Descriptors 0 to 2 are taken, so that no file that is opened later gets one of them and what is written to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # by processes that this one starts, as the streams are
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)


def say(message: str) -> None:
    """Print a line on standard error, on rank 0 only."""
    if this_rank() == 0:
        print(message, file=sys.stderr, flush=True)


_as_python_does = warnings.formatwarning


def _in_one_line(message: Warning | str, category: type[Warning], *args: Any, **more: Any) -> str:
    """A warning for users as its sentence alone, without the file and line that gave it."""
    if issubclass(category, UserWarning):
        return f"warning: {message}\n"
    return _as_python_does(message, category, *args, **more)


def warn_in_one_line() -> None:
    """Have Python print the runtime's warnings as `say` prints ours."""
    warnings.formatwarning = _in_one_line


def refuse(error: Exception, *, of_this_process: bool = False) -> int:
    """Say what is wrong with what the user wrote, before any rank works, and return the exit status.

    Args:
        of_this_process: other ranks do not find the same mistake, so this one says it whatever its number.
    """
    message = cut_short(str(error))
    if of_this_process:
        print(message, file=sys.stderr, flush=True)
    else:
        say(message)
    _tell_launcher(message)
    return MISTAKE


def leave(status: int) -> NoReturn:
    """End this process with the exit status of its program. A rank of a job does not wait for Python to be taken down.

    The threads of Gloo's process groups are still there. If Python is taken down under them, the process now and then
    aborts ("terminate called without an active exception": once or twice in some hundred jobs on a busy machine), and a
    job whose answer is there counts as failed.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    atexit._run_exitfuncs()
    leave_at_once(status)


def leave_at_once(status: int) -> NoReturn:
    """End this process with an exit status and what it has printed, whatever its threads are doing."""
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
            reason = _tell(error, ranks, fault_file)
            status = _status(error)
            if reason:
                _tell_launcher(reason)
            if os.environ.get("RUNAHEAD_TRACEBACK") == "1":
                traceback.print_exception(error)
            if ranks is not None:
                ranks.leave_store()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if printing fails, for lack of memory or of a reader
            os._exit(status)


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, Terminated):
        return 128 + error.number
    return MISTAKE if is_mistake(error) else 1


def _tell(error: BaseException, ranks: Ranks | None, fault_file: Path | None) -> str:
    """Print the line unless another rank does, notify the other ranks, and return the line."""
    if isinstance(error, SharedError):
        return str(error)
    if isinstance(error, SystemExit):
        return ""
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        if ranks is not None:
            ranks.fail("interrupted")
        return "interrupted"
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
    return reason


def _tell_launcher(reason: str) -> None:
    """Write the file from which torchrun takes the reason that it prints last, under "Root Cause".

    It is JSON in the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:  # the line is printed all the same
            json.dump({"message": about}, file)


def _reason(error: BaseException, ranks: Ranks | None) -> str:
    reason = first_line(error)
    if users_place(error) is not None:
        return line_of(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError | RunFailure):
        return reason
    if is_lack_of_memory(error):
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
