"""Ranks on this machine for tests: processes that stay, so that a test costs milliseconds instead of a start."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runahead.ranks.accelerator import prepare_environment
from runahead.ranks.ranks import Ranks

TASK_LIMIT_S = 120.0
TIMEOUT_S = 60.0
"""Timeout of the ranks, unless a test is about silence. A rank on a busy machine may do nothing for a while."""

PRELOADED = ["launch.infer", "runahead.engine", "tests.ranks.peer_tasks", "tests.ranks.tensor_tasks"]
"""Imported once, in the process that ranks are forked from: otherwise each of them takes seconds to import them.

The program comes first, since what it sets in the environment is read when torch is imported.
"""


class RankPool:
    """`size` processes, each with its `Ranks`; `run` calls a function on all of them at once.

    A function that is run must be importable (top level of a module). A rank's exception is raised here with that
    rank's traceback in its message.

    Args:
        device: "cuda" for ranks that share out the GPUs, of which there may be fewer than ranks, or virtual ones.
        backend: of the ranks.

    Attributes:
        stopped: a rank that a test stops. It is not waited for once the others have answered.
    """

    def __init__(self, size: int, device: str = "cpu", backend: str = "gloo") -> None:
        self.size = size
        self.stopped: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store_path = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store_path, there, device, backend), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(ranks, *args)`, by rank."""
        for connection in self._connections:
            connection.send((function, args))
        stopped_last = sorted(range(self.size), key=lambda rank: rank == self.stopped)
        outcomes = {rank: self._receive(rank, 0.5 if rank == self.stopped else TASK_LIMIT_S) for rank in stopped_last}
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in sorted(outcomes.items()) if error is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [outcomes[rank][0] for rank in range(self.size)]

    def _receive(self, rank: int, limit_s: float) -> tuple[Any, str | None]:
        if not self._connections[rank].poll(limit_s):
            return None, f"no answer within {limit_s:g} s"
        try:
            return self._connections[rank].recv()  # type: ignore[no-any-return]
        except EOFError:
            return None, "the process has ended"

    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # the server's recv fails, and it ends
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextmanager
def short_lived_pool(size: int) -> Iterator[RankPool]:
    """Ranks of which a test kills some, say, and which do not outlive it."""
    pool = RankPool(size)
    try:
        yield pool
    finally:
        for process in pool.processes:
            with suppress(ProcessLookupError):  # it may end by itself just now
                process.kill()
        pool.close()


def give_up_after(ranks: Ranks, timeout_s: float) -> None:
    """Give up, from now on, a peer that is silent for so long. Ranks meet, and load modules, with more patience."""
    ranks.timeout_s = ranks._watcher._timeout_s = timeout_s


def _serve(rank: int, size: int, store_path: str, connection: Connection, kind: str, backend: str) -> None:
    torch.set_num_threads(1)
    if kind == "cpu":
        _serve_on(torch.device("cpu"), rank, size, store_path, connection, backend)
        return
    from tests.virtual.cuda import gpu

    if backend == "nccl":
        prepare_environment()
    with gpu():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        _serve_on(device, rank, size, store_path, connection, backend)


def _serve_on(
    device: torch.device, rank: int, size: int, store_path: str, connection: Connection, backend: str
) -> None:
    ranks = Ranks(
        rank,
        size,
        device=device,
        backend=backend,
        timeout_s=TIMEOUT_S,
    ).join(store=dist.FileStore(store_path, size) if size > 1 else None, may_share_gpus=backend == "gloo")
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            ranks.arrange(1)  # whatever a test before has made of them
            connection.send((function(ranks, *args), None))
        except Exception:
            connection.send((None, traceback.format_exc()))
