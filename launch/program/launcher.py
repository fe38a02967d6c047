"""What started this rank: torchrun, or SLURM's srun itself."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1
FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports for ranks to meet at: below those that Linux hands out by itself."""


def follow_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Find this rank's place, and tie its life to torchrun's. To be called before anything reads the place."""
    place = slurm_place(environment)
    if place is not None:
        environment.update(place)
    if "TORCHELASTIC_RUN_ID" in environment and sys.platform == "linux":
        # Ranks have a session of their own, so nothing else ends them when torchrun is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def slurm_place(environment: MutableMapping[str, str]) -> dict[str, str] | None:
    """What torchrun would have set, for a task among several that srun started; None for everybody else.

    A batch script, or one task alone, has no SLURM_STEP_NUM_TASKS above 1. What is set already is left alone.
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
    """SLURM's "2(x3),1" as [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of SLURM's "gpu[03-05,9]-ib,login": gpu03-ib."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]
