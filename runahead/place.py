"""A process's place in its job, from the variables of torchrun or of a step of SLURM. It needs no torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from runahead.failures import SharedError

FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports for the rendezvous of ranks, below the range from which Linux assigns ports itself."""

REMEDY = "start the ranks with torchrun or srun, or unset it to run as one rank"

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets."""


@dataclass(frozen=True)
class JobPlace:
    """A rank.

    Attributes:
        rank, size: number of this rank, and of ranks.
        local_rank, local_size: number of this rank among those of its host, and of ranks on its host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> JobPlace:
        """The place that torchrun's variables describe, by default this process's; without them, that of the only rank.

        Raises:
            ValueError: a variable is missing or makes no sense. The message names it.
        """
        environment = os.environ if environment is None else environment
        rank, size = whole_number(environment, "RANK", 0), whole_number(environment, "WORLD_SIZE", 1)
        local_rank = whole_number(environment, "LOCAL_RANK", rank)
        local_size = whole_number(environment, "LOCAL_WORLD_SIZE", size)
        if size > 1 and "RANK" not in environment:
            raise ValueError(f"WORLD_SIZE={size} is set but RANK is not; {REMEDY}")
        if local_size < size and "LOCAL_RANK" not in environment:
            raise ValueError(
                f"LOCAL_WORLD_SIZE={local_size} is set but LOCAL_RANK is not; start the ranks with torchrun or srun"
            )
        if rank >= size:
            raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}; ranks are numbered from 0")
        if local_rank >= local_size:
            raise ValueError(
                f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}; ranks of a host are numbered "
                "from 0"
            )
        return JobPlace(rank, size, local_rank, local_size)


def whole_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Value of a variable that is a whole number. Raises: ValueError, which names the variable."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name}={text} is not a whole number; {REMEDY}")
    return int(text)


def check_meeting_point(environment: Mapping[str, str]) -> None:
    """Check the address at which the ranks of a job are to meet.

    Raises:
        ValueError: a variable is missing, or cannot be an address or a port. The message names it.
        SharedError: on all ranks of a host but its first, since its name server answers all of them alike.
    """
    place = JobPlace.from_environment(environment)
    if place.size == 1:
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(f"WORLD_SIZE={place.size} but {name} is not set; start the ranks with torchrun or srun")
    host, port = environment["MASTER_ADDR"], whole_number(environment, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is no port; use 1 to 65535")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        reason = getattr(error, "strerror", None) or error
        message = (
            f"MASTER_ADDR={host} does not resolve on {socket.gethostname()} ({reason}); give the address of rank 0's "
            "host"
        )
        raise (ValueError(message) if place.local_rank == 0 else SharedError(message, is_mistake=True)) from error


def slurm_place(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The variables that torchrun would set, for one of several tasks of srun; None for any other process.

    A batch script or a single task has no SLURM_STEP_NUM_TASKS above 1. Variables that are set keep their value.

    Raises:
        ValueError: a variable is missing or makes no sense. The message names it.
        SharedError: on all tasks but the first, if a variable is missing.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if size == "1" or "RANK" in environment:
        return None
    numbers = ["SLURM_PROCID", "SLURM_LOCALID"]
    numbers += [] if "LOCAL_WORLD_SIZE" in environment else ["SLURM_NODEID"]
    numbers += [] if "MASTER_PORT" in environment else ["SLURM_JOB_ID", "SLURM_STEP_ID"]
    texts = [] if "LOCAL_WORLD_SIZE" in environment else ["SLURM_STEP_TASKS_PER_NODE"]
    texts += [] if "MASTER_ADDR" in environment else ["SLURM_STEP_NODELIST"]
    if missing := [name for name in (*numbers, *texts) if not environment.get(name)]:
        message = (
            f"SLURM_STEP_NUM_TASKS={size} says that this is one of several tasks of srun, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; pass all of SLURM's variables on, or unset "
            "SLURM_STEP_NUM_TASKS to run as one rank"
        )
        is_first = environment.get("SLURM_PROCID", "0") == "0"
        raise ValueError(message) if is_first else SharedError(message, is_mistake=True)
    values = {name: whole_number(environment, name) for name in ("SLURM_STEP_NUM_TASKS", *numbers)}
    if values["SLURM_PROCID"] >= values["SLURM_STEP_NUM_TASKS"]:
        raise ValueError(
            f"SLURM_PROCID={values['SLURM_PROCID']} is not below SLURM_STEP_NUM_TASKS={size}; tasks are numbered from "
            "0: pass SLURM's variables on as they are"
        )
    place = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": size, "LOCAL_RANK": environment["SLURM_LOCALID"]}
    if "LOCAL_WORLD_SIZE" not in environment:
        node, local_id, tasks = (
            values["SLURM_NODEID"],
            values["SLURM_LOCALID"],
            environment["SLURM_STEP_TASKS_PER_NODE"],
        )
        num_local = _tasks_of_node(tasks, node)
        if local_id >= num_local:
            raise ValueError(
                f"SLURM_LOCALID={local_id} but SLURM_STEP_TASKS_PER_NODE={tasks} has {num_local} tasks on node {node}, "
                "which are numbered from 0: pass SLURM's variables on as they are"
            )
        place["LOCAL_WORLD_SIZE"] = str(num_local)
    if "MASTER_ADDR" not in environment:
        place["MASTER_ADDR"] = first_host(environment["SLURM_STEP_NODELIST"])
    if "MASTER_PORT" not in environment:
        place["MASTER_PORT"] = str(FIRST_PORT + (values["SLURM_JOB_ID"] * 8 + values["SLURM_STEP_ID"]) % NUM_PORTS)
    return place | {name: environment[name] for name in TORCHRUNS if name in environment}


def _tasks_of_node(text: str, node: int) -> int:
    name = f"SLURM_STEP_TASKS_PER_NODE={text}"
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ValueError(f"{name} is no list of tasks such as 2(x3),1; {REMEDY}")
    counts = tasks_per_node(text)
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node} but {name} has {len(counts)} nodes, which are numbered from 0")
    return counts[node]


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
