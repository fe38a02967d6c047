"""A rank's process, as other processes of its machine can see it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path


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
    facts: Mapping[str, str] = field(hash=False)

    @classmethod
    def of_process(cls, pid: int, rank: int) -> Presence:
        """Describe another process of this machine, of which nothing else is known."""
        return replace(cls.here(rank, {}), pid=pid, started=_started(pid) or 0)

    @classmethod
    def here(cls, rank: int, facts: Mapping[str, str]) -> Presence:
        """Describe this process."""
        machine = ""
        with suppress(FileNotFoundError, PermissionError):  # no /proc
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(rank, socket.gethostname(), machine, os.getpid(), _started(os.getpid()) or 0, facts)

    def is_beside(self, other: Presence) -> bool:
        """Whether one process can see and signal the other."""
        return self.machine == other.machine != ""

    @property
    def has_ended(self) -> bool:
        """Whether a process of this machine is known to have ended (a zombie counts as ended)."""
        try:
            return _started(self.pid) != self.started
        except OSError:  # as of too many open files
            return False

    @property
    def is_stopped(self) -> bool:
        """Whether a process of this machine is stopped, as by SIGSTOP: it does not end by itself."""
        with suppress(OSError):
            return (_stat(self.pid) or [""])[0] == "T"
        return False


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if it has ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Fields of proc_pid_stat(5) from the state on, or None if there is no such process.

    Raises:
        OSError: they cannot be read.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
