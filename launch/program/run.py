"""Run of a program, from its command line to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

# One line of ours reports a lost connection; PyTorch's own warning prints a C++ stack trace.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from launch.program.ahead import Ahead, load_library_of_torch, uncollected
from launch.program.compose import CommandLine, Program
from launch.program.ending import MISTAKE, end_with, leave_at_once, open_closed_streams, refuse, say, warn_in_one_line
from launch.program.launcher import follow_launcher, this_rank
from launch.program.lean_imports import lean_imports
from launch.program.signals import ending_signals
from runahead.config import RanksOptions
from runahead.failures import SharedError

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks


class RunsOnRanks(Protocol):
    """Options of a run that include those of its ranks."""

    ranks: RanksOptions


OF_ONE_HOST = (
    *("model.path", "model.config", "model.adapter", "ranks.threads", "ranks.fault_report"),
    *("answers", "report", "timeline"),
)
"""Options that may differ between hosts. Whether models are equal is checked by their weights."""

NO_RUN = ("-h", "--help", "-c=", "--cfg", "--layout", "-m", "--multirun")
"""Beginnings of flags with which this process needs no torch."""

R = TypeVar("R", bound=RunsOnRanks)


def run_program(
    program: Program[R],
    args: Sequence[str] | None,
    work: Callable[[R, Ranks], object],
    *,
    warnings: Callable[[R], list[str]] = lambda run: [],
    without_ranks: Callable[[R], bool] = lambda run: False,
    print_layout: Callable[[R], object] | None = None,
) -> int:
    """Run a program and return its exit status.

    The status is 0 for success, 1 for a failure, 2 for a mistake in what the user wrote, 130 after Ctrl-C and 143 after
    SIGTERM. torchrun has a status of its own, which is 1 if a rank has failed for whatever reason.

    Args:
        args: arguments after the program's name; None takes those of this process.
        work: called with the options on every rank.
        warnings: returns a sentence for each setting that has no effect; they are printed before any rank works.
        without_ranks: called before any rank is started; if it returns True, the program is done.
        print_layout: called in place of `work`, without ranks, if the flag --layout is given.
    """
    open_closed_streams()
    try:
        follow_launcher()
    except SharedError:
        return MISTAKE
    except ValueError as error:
        return refuse(error, of_this_process=True)
    warn_in_one_line()
    command = _read(program, sys.argv[1:] if args is None else args)
    if isinstance(command, int):
        return command
    if command.to_print is not None:
        if this_rank() == 0:
            print(command.to_print, end="")
        return 0

    from runahead.features.versions import outside  # not for --help

    for sentence in outside():
        say(f"warning: {sentence}")
    try:
        if "--multirun" in command.flags:
            from launch.program.sweep import run_sweep

            return run_sweep(program, command)
        run = command.run
        assert run is not None
        for sentence in warnings(run):
            say(f"warning: {sentence}")
        if "--layout" in command.flags:
            assert print_layout is not None, program.module
            print_layout(run)
            return 0
        if without_ranks(run):
            return 0
    except BaseException as error:
        end_with(error, None)
    _work_on_ranks(run, work)
    return 0


def _read(program: Program[R], args: Sequence[str]) -> CommandLine[R] | int:
    """The arguments, during whose reading torch's library is loaded if they ask for a run; a status if one is wrong."""
    library = None if any(arg.startswith(NO_RUN) for arg in args) else load_library_of_torch()
    try:
        return program.read(args)
    except ValueError as error:
        status = refuse(error)
        if library is not None and library.is_alive():  # Python would wait for it
            leave_at_once(status)
        return status
    except KeyboardInterrupt as error:
        end_with(error, None)


def _work_on_ranks(run: R, work: Callable[[R, Ranks], object]) -> None:
    """Do the work as one of the ranks of the job; whatever goes wrong ends the process with its status."""
    ranks: Ranks | None = None
    fault_file: Path | None = None

    def end(error: BaseException) -> NoReturn:
        end_with(error, ranks, fault_file)

    with ending_signals(end):
        try:
            with uncollected(), lean_imports():
                # Imported here because it imports torch, which --help and a mistyped option need not wait for.
                from runahead.ranks.agreement import option_facts
                from runahead.ranks.ranks import Ranks

                fault_file = _fault_file(run, this_rank())
                ranks = Ranks.before_joining(run.ranks)
                ranks.when_stuck(end)
                engine = Ahead("runahead.engine", beside=ranks.size > 1)
                ranks.join(num_shares=run.ranks.tensor)
                with ranks.busy():
                    engine.wait()
            ranks.require_same(option_facts(run, OF_ONE_HOST), "start every rank with the same command line")
            ranks.on_all_ranks("the fault reports", partial(_check_fault_file, run, fault_file))
            work(run, ranks)
            ranks.close()
        except BaseException as error:
            end(error)


def _fault_file(run: RunsOnRanks, rank: int) -> Path | None:
    """Path of a rank's fault report: the one that was asked for, or one beside the report."""
    from runahead.ranks.fault_report import fault_path

    if run.ranks.fault_report is not None:
        return fault_path(run.ranks.fault_report, rank)
    report = getattr(run, "report", None)
    if not isinstance(report, str) or not report or (os.path.exists(report) and not os.path.isfile(report)):
        return None  # no report, or one that goes to a device or a pipe
    return fault_path(report, rank)


def _check_fault_file(run: RunsOnRanks, path: Path | None) -> None:
    """Raises: ValueError, if a fault report was asked for and cannot be written."""
    from runahead.files import ensure_writable

    if run.ranks.fault_report is not None and path is not None:
        ensure_writable(path, option="ranks.fault_report")
