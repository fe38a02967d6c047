"""Rendezvous of the ranks of a job: exchange their process ids and compare their library versions."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from runahead.failures import SharedError
from runahead.ranks.agreement import disagreement

POLL_S = 0.05
"""Seconds between two looks at what is waited for."""


@dataclass(frozen=True)
class Presence:
    """A rank's process.

    Attributes:
        host: name of its host.
        machine: boot id and process-id namespace; processes with the same `machine` can see each other. "" if unknown.
        pid, started: process id, and its start in clock ticks since boot, which tells reused ids apart.
        facts: values by name that must be the same on all ranks.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: int
    facts: Mapping[str, str]

    @classmethod
    def here(cls, rank: int, facts: Mapping[str, str]) -> Presence:
        """Describe this process."""
        machine = ""
        with suppress(OSError):  # no /proc
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(rank, socket.gethostname(), machine, os.getpid(), _started(os.getpid()) or 0, facts)

    def is_beside(self, other: Presence) -> bool:
        """Whether one process can see and signal the other."""
        return self.machine == other.machine != ""

    @property
    def has_ended(self) -> bool:
        """Whether a process of this machine has ended (a zombie counts as ended)."""
        return _started(self.pid) != self.started


@cache
def environment_store(rank: int, size: int, patience_s: float) -> dist.Store:
    """The store that the launcher's environment variables name.

    It stays connected until the process ends, since a later job of these processes may meet there again while another
    rank still leaves the one before.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience_s)))
    return store


def store_of_job(store: dist.Store, rank: int) -> dist.Store:
    """The part of a store that belongs to the job that this rank joins now: its first one, its second one, ..."""
    number = store.add(f"runahead-jobs-of-{rank}", 1)
    return dist.PrefixStore(f"runahead-job-{number}", store)


def meet(store: dist.Store, rank: int, size: int, facts: Mapping[str, str], *, patience_s: float) -> list[Presence]:
    """Wait until all ranks have started, and return their processes in order of rank.

    Args:
        facts: values by name that must be the same on all ranks.
        patience_s: seconds to wait for ranks that have not started.

    Raises:
        ValueError: ranks did not start in time; on rank 0 also if facts differ. The message names the ranks.
        SharedError: on the other ranks, if facts differ.
    """
    here = dist.PrefixStore("runahead-here", store)
    own = Presence.here(rank, facts)
    here.set(str(rank), json.dumps(asdict(own)))
    deadline = time.monotonic() + patience_s
    while missing := [peer for peer in range(size) if not here.check([str(peer)])]:
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank {', '.join(map(str, missing))} of {size} did not start within {patience_s:.0f} s; check its "
                "host and its messages"
            )
        time.sleep(POLL_S)
    ranks = [Presence(**json.loads(here.get(str(peer)))) for peer in range(size)]
    differing = disagreement([each.facts for each in ranks])
    if differing is not None:
        here.set(f"{rank} knows", "")
        while rank == 0 and time.monotonic() < deadline and not here.check([f"{peer} knows" for peer in range(size)]):
            time.sleep(POLL_S)  # the store may end with this process, so the others must have read it
        message = f"{differing}; install the same on every host"
        raise ValueError(message) if rank == 0 else SharedError(message, is_mistake=True)
    return ranks


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if it has ended. Fields as in proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
