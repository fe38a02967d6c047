"""A program's way from its command line to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

# A lost connection is told in our one line; PyTorch's own warning about it brings a C++ stack trace.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from launch.program.compose import Program, this_rank
from launch.program.ending import end_with, say
from launch.program.launcher import follow_launcher
from launch.program.signals import ending_signals
from runahead.config import RanksOptions

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks


class RunsOnRanks(Protocol):
    """Options of a run that say how its ranks work together."""

    ranks: RanksOptions


OF_ONE_HOST = ("model.path", "model.config", "ranks.threads", "ranks.fault_report", "report", "timeline")
"""Options that may differ between hosts. Whether the models are the same is found out from their weights."""

R = TypeVar("R", bound=RunsOnRanks)


def run_program(
    program: Program[R],
    args: Sequence[str] | None,
    work: Callable[[R, Ranks], object],
    *,
    warnings: Callable[[R], list[str]] = lambda run: [],
    without_ranks: Callable[[R], bool] = lambda run: False,
) -> int:
    """The whole program.

    Its exit status: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted, 143 ended by SIGTERM.

    Args:
        args: after the program's name; None takes those of this process.
        work: what every rank does with the options.
        warnings: sentences about settings that change nothing, told before any rank works.
        without_ranks: does what needs no ranks; true if that was all.
    """
    follow_launcher()
    try:
        command = program.read(sys.argv[1:] if args is None else args)
    except ValueError as error:
        say(str(error))
        return 2
    if command.to_print is not None:
        if this_rank() == 0:
            print(command.to_print, end="")
        return 0
    run = command.run
    assert run is not None
    for sentence in warnings(run):
        say(f"warning: {sentence}")
    ranks: Ranks | None = None
    fault_file: Path | None = None

    def end(error: BaseException) -> NoReturn:
        end_with(error, ranks, fault_file)

    try:
        if without_ranks(run):
            return 0
    except BaseException as error:
        end(error)
    with ending_signals(end):
        try:
            # Imported late: it brings torch, for which --help and a typing error should not wait.
            from runahead.ranks.agreement import option_facts
            from runahead.ranks.ranks import Ranks

            ranks = Ranks.start(run.ranks)
            ranks.when_stuck(end)
            ranks.require_same(option_facts(run, OF_ONE_HOST), "start every rank with the same command line")
            fault_file = ranks.on_all_ranks("the fault reports", partial(_fault_file, run, ranks.rank))
            work(run, ranks)
            ranks.close()
        except BaseException as error:
            end(error)
    return 0


def _fault_file(run: RunsOnRanks, rank: int) -> Path | None:
    """Where a rank writes what it knows when it has to end: as asked for, or beside the report.

    Raises: ValueError if it was asked for and cannot be written.
    """
    from runahead.files import ensure_writable
    from runahead.ranks.fault_report import fault_path

    if run.ranks.fault_report is not None:
        path = fault_path(run.ranks.fault_report, rank)
        ensure_writable(path, option="ranks.fault_report")
        return path
    report = getattr(run, "report", None)
    if not isinstance(report, str) or not report or (os.path.exists(report) and not os.path.isfile(report)):
        return None  # none, or a device or a pipe, beside which nothing belongs
    return fault_path(report, rank)
