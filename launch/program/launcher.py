"""Rank, world size and parent process, from torchrun's environment or SLURM's."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports for the rendezvous of ranks, below the range from which Linux assigns ports itself."""


def follow_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torchrun would set, and end this rank when torchrun ends.

    Call it before anything reads these variables.
    """
    place = slurm_place(environment)
    if place is not None:
        environment.update(place)
    if "TORCHELASTIC_RUN_ID" in environment:
        # Ranks have a session of their own, so nothing else ends them when torchrun is killed.
        end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Have this process receive a signal when its parent ends. Systems other than Linux have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def slurm_place(environment: MutableMapping[str, str]) -> dict[str, str] | None:
    """The variables that torchrun would set, for one of several tasks of srun; None for any other process.

    A batch script or a single task has no SLURM_STEP_NUM_TASKS above 1. Variables that are set keep their value.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if size == "1" or "RANK" in environment:
        return None
    node, job, step = (int(environment[f"SLURM_{name}"]) for name in ("NODEID", "JOB_ID", "STEP_ID"))
    place = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(FIRST_PORT + (job * 8 + step) % NUM_PORTS),
    }
    return {name: environment.get(name, value) for name, value in place.items()}


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, from SLURM's notation: "2(x3),1" is [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """First host of a list in SLURM's notation: of "gpu[03-05,9]-ib,login" it is gpu03-ib."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def this_rank() -> int:
    """This process's rank from torchrun's environment; needs no process group."""
    return int(os.environ.get("RANK", "0"))


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
