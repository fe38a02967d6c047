"""Gloo ranks on this machine for tests: processes that stay, so that a test costs milliseconds instead of a start."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runahead.ranks.ranks import Ranks

TASK_LIMIT_S = 120.0

PRELOADED = ["launch.infer", "runahead.engine", "tests.ranks.peer_tasks", "tests.ranks.tensor_tasks"]
"""Imported once, in the process that ranks are forked from: otherwise each of them takes seconds to import them.

The program comes first, since what it sets in the environment is read when torch is imported.
"""


class RankPool:
    """`size` processes, each with its `Ranks`; `run` calls a function on all of them at once.

    A function that is run must be importable (top level of a module). A rank's exception is raised here with that
    rank's traceback in its message.
    """

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store_path = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store_path, timeout_s, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(ranks, *args)`, by rank."""
        for connection in self._connections:
            connection.send((function, args))
        outcomes = [self._receive(rank) for rank in range(self.size)]
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(outcomes) if error is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [result for result, _ in outcomes]

    def _receive(self, rank: int) -> tuple[Any, str | None]:
        if not self._connections[rank].poll(TASK_LIMIT_S):
            return None, f"no answer within {TASK_LIMIT_S:g} s"
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


def _serve(rank: int, size: int, store_path: str, timeout_s: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(
        rank,
        size,
        device=torch.device("cpu"),
        backend="gloo",
        timeout_s=timeout_s,
        store=dist.FileStore(store_path, size) if size > 1 else None,
    )
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
