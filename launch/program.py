"""A program's way from its command line to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

# A lost connection is told in our one line; PyTorch's own warning about it brings a C++ stack trace.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from launch.compose import Program, this_rank
from launch.ending import end_with, say
from runahead.config import RanksOptions

if TYPE_CHECKING:
    from runahead.ranks import Ranks


class RunsOnRanks(Protocol):
    """Options of a run that say how its ranks work together."""

    ranks: RanksOptions


R = TypeVar("R", bound=RunsOnRanks)


def run_program(
    program: Program[R],
    args: Sequence[str] | None,
    work: Callable[[R, Ranks], object],
    *,
    warnings: Callable[[R], list[str]] = lambda run: [],
    without_ranks: Callable[[R], bool] = lambda run: False,
) -> int:
    """The whole program. Its exit status: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted.

    Args:
        args: after the program's name; None takes those of this process.
        work: what every rank does with the options.
        warnings: sentences about settings that change nothing, told before any rank works.
        without_ranks: does what needs no ranks; true if that was all.
    """
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
    try:
        if without_ranks(run):
            return 0
        # Imported late: it brings torch, for which --help and a typing error should not wait.
        from runahead.ranks import Ranks

        ranks = Ranks.start(run.ranks)
        work(run, ranks)
        ranks.close()
    except BaseException as error:
        end_with(error, ranks)
    return 0
