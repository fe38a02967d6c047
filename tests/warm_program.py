"""Programs of Runahead in processes that are forked from one that has imported the runtime, which saves seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rank_pool import PRELOADED


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


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _run(script: str, args: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
