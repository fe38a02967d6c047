"""This process as its launcher sees it: its place, and its end when torchrun ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping
from contextlib import suppress

from runahead.place import JobPlace, check_meeting_point, slurm_place

PR_SET_PDEATHSIG = 1


def follow_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torchrun would set, and end this rank when torchrun ends.

    Call it before anything reads these variables.

    Raises:
        ValueError: a variable is missing or makes no sense. The message names it.
        SharedError: likewise, where another rank says so.
    """
    place = slurm_place(environment)
    if place is not None:
        environment.update(place)
    check_meeting_point(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        # Ranks have a session of their own, so nothing else ends them when torchrun is killed.
        end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Have this process receive a signal when its parent ends. Systems other than Linux have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def this_rank() -> int:
    """This process's rank from torchrun's environment; needs no process group. 0 where that makes no sense."""
    with suppress(ValueError):
        return JobPlace.from_environment().rank
    return 0


def require_one_rank(num_ranks: int, work: str, command: str) -> None:
    """Check that one rank was started for work that is done on one.

    Args:
        num_ranks: ranks that were started.
        work: such as "maps are fitted", for the message.
        command: starts one rank.

    Raises:
        ValueError: more than one was started.
    """
    if num_ranks > 1:
        raise ValueError(f"{work} on one rank but {num_ranks} were started; use {command}")
