"""Programs of Runahead in processes that are forked from one that has imported the runtime, which saves seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.rank_pool import PRELOADED

NOTHING: Mapping[str, str] = MappingProxyType({})


class Outputs(NamedTuple):
    """Output of the ranks of a job, one rank after the other."""

    stdout: str
    stderr: str


class WarmProgram:
    """A script in a process of its own, as subprocess.Popen would run it.

    Args:
        environment: added to this process's own.
        folder: an existing one, for what the program writes to standard output and error.
    """

    def __init__(self, script: Path, args: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._outputs = [folder / "stdout", folder / "stderr"]
        started = (str(script), list(args), dict(os.environ | environment), list(map(str, self._outputs)))
        self._process = context.Process(target=_run, args=started)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, minus the number of a signal that ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int | None:
        """`status`, within a limit."""
        self._process.join(timeout_s)
        return self.status

    @property
    def output(self) -> str:
        return _text(self._outputs[0])

    @property
    def errors(self) -> str:
        return _text(self._outputs[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class WarmJob:
    """Ranks of a script as torchrun starts them, but without torchrun, which would end the others before they notice.

    Args:
        args: those of each rank.
        environment: added to what torchrun sets, or in its place.

    Attributes:
        store_port: where torchrun's store would be.
    """

    def __init__(self, script: Path, args: Sequence[Sequence[str]], environment: Mapping[str, str] = NOTHING) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.ranks: list[WarmProgram] = []
        self.store_port = free_port()
        for rank, given in enumerate(args):
            of_rank = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(args)),
                "LOCAL_WORLD_SIZE": str(len(args)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store_port),
                "OMP_NUM_THREADS": "1",
                **environment,
            }
            folder = Path(self._folder.name) / str(rank)
            folder.mkdir()
            self.ranks.append(WarmProgram(script, given, of_rank, folder))

    def kill(self) -> None:
        """End the ranks that still run, also those that a test has stopped."""
        for rank in self.ranks:
            if rank.status is None:
                rank.kill()
        self._folder.cleanup()


def run_warm(script: Path, args: Sequence[str], size: int = 2, environment: Mapping[str, str] = NOTHING) -> Outputs:
    """Run ranks of a script to their end, which has to be without an error."""
    job = WarmJob(script, [args] * size, environment)
    try:
        statuses = [rank.wait(120) for rank in job.ranks]
        done = Outputs("".join(rank.output for rank in job.ranks), "".join(rank.errors for rank in job.ranks))
        assert statuses == [0] * size, done.stderr
        return done
    finally:
        job.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _run(script: str, args: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
