"""Processes that are kept for many measurements: each is asked and answers by a JSON line at a time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import free_port
from runahead.model.loading.quiet import one_line


class LineProcesses:
    """Processes that read requests from standard input and answer on standard output.

    Each sends a first answer when it is ready.

    Args:
        command: of each of them.
        environments: variables of each process, beside those of this one.
        what: the processes, in messages; of several, the rank that ended is named, too.
        log: file of what they say on standard error; None leaves it on this one's.

    Attributes:
        ready: the first answer of the first process.

    Raises:
        ValueError: one of them has ended before it was ready; it, or the file's last line, says why.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        cwd: Path,
        what: str,
        log: Path | None = None,
    ) -> None:
        self._what, self._log = what, log
        self._processes = list[subprocess.Popen[str]]()
        with ExitStack() as undo:
            errors = None if log is None else undo.enter_context(log.open("w"))
            undo.callback(self.kill)
            for environment in environments:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        cwd=cwd,
                        env=os.environ | dict(environment),
                        text=True,
                    )
                )
            self.ready = self._answers(self._processes)[0]
            undo.pop_all()
            if errors is not None:
                errors.close()

    def ask(self, request: dict[str, Any], *, ranks: int | None = None) -> Any:
        """Send a request to the first processes, by default to all, and wait for their answers. Returns: the first's.

        Raises:
            ValueError: a process has ended.
        """
        asked = self._processes[:ranks]
        for process in asked:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its answer is missing, too
        return self._answers(asked)[0]

    def _answers(self, asked: Sequence[subprocess.Popen[str]]) -> list[Any]:
        found = list[Any]()
        for number, process in enumerate(asked):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                which = f" (rank {number})" if len(self._processes) > 1 else ""
                raise ValueError(f"{self._what}{which} ended; {self._reason()}")
            found.append(json.loads(line))
        return found

    def _reason(self) -> str:
        if self._log is None:
            return "see its message above"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else "it said nothing"

    def close(self) -> None:
        """End the processes, which do so when their input ends."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
            process.wait()


def rank_environments(num_ranks: int, *, threads: int, checkout: Path) -> list[dict[str, str]]:
    """Variables of ranks of this host, which meet at a free port, and import a checkout's modules."""
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": str(threads)}
    return [shared | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
