"""A job of launch/infer.py under torchrun, and all that belongs to it: processes, namespaces, folders."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Self

from benchmarks.network import ShapedNetwork
from benchmarks.network.namespaces import system
from benchmarks.network.shaped_network import INTERFACE
from tests.faults.drills import Drill

HERE = Path(__file__).resolve().parent
MARK = "RUNAHEAD_DRILL"
LINK_GBPS = 1.0
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Makes hosts of two network namespaces: a rank of one cannot see or end those of the other."""
START_S = 120.0
"""Seconds within which a job comes to its moment, or to its end without one. Generous: machines are busy."""

_numbers = itertools.count()


class Job:
    """torchrun on one host, or on two that a link joins, each with its ranks. Use it in a `with` block.

    Args:
        program: what torchrun is to run; of one rank, what Python is to run by itself.
        cache: RUNAHEAD_CACHE of the job.

    Attributes:
        launchers: the processes that were started here.
        seen: all processes of the job that were ever looked at.
        folder: where it runs; what it writes goes there.
    """

    def __init__(self, drill: Drill, program: list[str], folder: Path, *, cache: Path | None = None) -> None:
        self.folder = folder
        self.moment, self.acted = folder / "moment", folder / "acted"
        self._drill, self._program, self._cache = drill, program, cache
        self._mark = f"{os.getpid()}-{next(_numbers)}"
        self._undo = ExitStack()
        self._outputs: list[tuple[IO[bytes], IO[bytes]]] = []
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.seen: set[int] = set()
        self.network: ShapedNetwork | None = None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.kill)
            hosts = self._drill.hosts
            if hosts > 1:
                self.network = undo.enter_context(ShapedNetwork(hosts, gbps=LINK_GBPS))
            for host in range(hosts):
                output = (undo.enter_context(tempfile.TemporaryFile()), undo.enter_context(tempfile.TemporaryFile()))
                self._outputs.append(output)
                self.launchers.append(
                    subprocess.Popen(
                        [*self._torchrun(host, hosts), *self._program],
                        cwd=self.folder,
                        env=self._environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=output[0],
                        stderr=output[1],
                        start_new_session=True,
                    )
                )
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _torchrun(self, host: int, hosts: int) -> list[str]:
        if self._drill.size == 1:
            return [sys.executable]
        program = [sys.executable, "-m", "torch.distributed.run"]
        if self.network is None:
            return [*program, "--standalone", f"--nproc-per-node={self._drill.size}"]
        return [
            *self.network.inside(host),
            *OWN_PROCESSES,
            *program,
            f"--nnodes={hosts}",
            f"--nproc-per-node={self._drill.size // hosts}",
            f"--node-rank={host}",
            f"--master-addr={self.network.addresses[0]}",
            "--master-port=29500",  # of a namespace's own
        ]

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {
            MARK: self._mark,
            "FAULT": json.dumps(self._drill.fault or {}),
            "MOMENT": str(self.moment),
            "ACTED": str(self.acted),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(HERE.parents[1]),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if self._cache is not None:
            environment["RUNAHEAD_CACHE"] = str(self._cache)
        if self.network is not None:
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            environment["RUNAHEAD_SECRET"] = "of these drills alone"
        return environment

    def await_moment(self) -> bool:
        """Wait for the moment, and return whether it came; False if the job ended without it.

        Raises:
            TimeoutError: neither happened.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.moment.exists():
                return True
            if not self.processes() and None not in self.statuses:
                return False
            time.sleep(0.005)
        raise TimeoutError(f"the moment did not come within {START_S:g} s")

    def cut_link(self) -> None:
        """Nothing gets from one host to the other any more."""
        assert self.network is not None
        system("ip", "-n", self.network.hosts[1], "link", "set", INTERFACE, "down")

    def starve_link(self, bits_per_s: int) -> None:
        """Hardly anything gets through, in either direction."""
        assert self.network is not None
        for host in self.network.hosts:
            bucket = ["rate", f"{bits_per_s}bit", "burst", "1600", "limit", "65536"]
            system("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket)

    def end(self, within_s: float) -> float | None:
        """Seconds until all ranks had ended, once the launchers had, too; None if some had not after `within_s`."""
        began, ranks_gone_s = time.monotonic(), None
        while ranks_gone_s is None or self.processes() or None in self.statuses:
            if ranks_gone_s is None and not self.processes(of_ranks=True):
                ranks_gone_s = time.monotonic() - began
            if time.monotonic() - began > within_s:
                return None
            time.sleep(0.02)
        return ranks_gone_s

    def processes(self, *, of_ranks: bool = False) -> list[int]:
        """All that run with this job's mark in their environment, whoever their parents are now; or only ranks."""
        for launcher in self.launchers:
            launcher.poll()  # else they stay as zombies
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with suppress(OSError):
                    environment = (path / "environ").read_bytes().split(b"\0")
                    is_rank = any(entry.startswith(b"RANK=") for entry in environment)
                    if wanted in environment and (is_rank or not of_ranks):
                        found.append(int(path.name))
        self.seen.update(found)
        return found

    def rank_process(self, rank: int) -> int:
        """Process id of a rank as this process sees it: those of a host of its own have other ids there."""
        entry, ranks = f"RANK={rank}".encode(), self.processes(of_ranks=True)
        parents: dict[int, int] = {}
        for pid in ranks:
            with suppress(OSError):  # it has just ended
                if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        [found] = parents.keys() - {pid for pid, parent in parents.items() if parent in parents}  # it started those
        return found

    def kill(self) -> None:
        """End what is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()

    @property
    def statuses(self) -> list[int | None]:
        return [launcher.poll() for launcher in self.launchers]

    @property
    def answer(self) -> str:
        """Standard output of the first host."""
        return self._read(0, 0)

    @property
    def errors(self) -> str:
        """Standard error of all hosts."""
        return "".join(self._read(host, 1) for host in range(len(self.launchers)))

    @property
    def lines(self) -> list[str]:
        """Lines of the ranks on standard error, without the launcher's pages."""
        own = self.errors.splitlines()
        return (
            own
            if self._drill.size == 1
            else [each for each in own if each.startswith("[rank ") or each == "interrupted"]
        )

    def _read(self, host: int, stream: int) -> str:
        descriptor = self._outputs[host][stream].fileno()
        # Not by seeking: the processes share the file's position.
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
