"""Where the processes of a job meet: who is there, and may they work together?"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from runahead.failures import SharedError
from runahead.ranks.agreement import disagreement

POLL_S = 0.05


@dataclass(frozen=True)
class Presence:
    """A rank's process, as it presents itself.

    Attributes:
        host: its host's name.
        machine: what must be the same for process ids to mean the same: boot and namespace; "" if unknown.
        pid, started: id, and its start in clock ticks since boot, since ids are used again.
        facts: what must be the same on all ranks.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: int
    facts: Mapping[str, str]

    @classmethod
    def here(cls, rank: int, facts: Mapping[str, str]) -> Presence:
        """Of this process."""
        machine = ""
        with suppress(OSError):  # no /proc
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(rank, socket.gethostname(), machine, os.getpid(), _started(os.getpid()) or 0, facts)

    def is_beside(self, other: Presence) -> bool:
        """Can one process see and signal the other?"""
        return self.machine == other.machine != ""

    @property
    def has_ended(self) -> bool:
        """Is a process of this machine gone, or gone but for its exit status?"""
        return _started(self.pid) != self.started


def meet(store: dist.Store, rank: int, size: int, facts: Mapping[str, str], *, patience_s: float) -> list[Presence]:
    """All ranks, once they have come.

    Args:
        facts: what must be the same on all ranks, by name.
        patience_s: for which ranks that have not come yet are waited for.

    Raises:
        ValueError: names those that have not come; on rank 0, those whose facts differ, and in what.
        SharedError: on the other ranks, where facts differ.
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
            time.sleep(POLL_S)  # the store may end with this process
        raise (ValueError if rank == 0 else SharedError)(f"{differing}; install the same on every host")
    return ranks


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process that runs; None if it has ended. Fields of proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
