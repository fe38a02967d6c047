"""The ranks of one commit, in a checkout of it, which measure one request after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.machine import ROOT, free_port

NUM_RANKS = 2
RANK = Path("benchmarks/studies/commits/rank.py")


class RankPair:
    """Two ranks of one thread each.

    Args:
        checkout: folder of the commit. Its own `rank.py` runs, which knows its modules; an older commit that has none
            runs this checkout's.
        program: what a rank runs, a path in the checkout.
    """

    def __init__(self, checkout: Path, *, program: Path = RANK) -> None:
        self._checkout, port, own = checkout, str(free_port()), checkout / program
        self._ranks = []
        for rank in range(NUM_RANKS):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(checkout)}
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
            command = [sys.executable, str(own if own.is_file() else ROOT / program)]
            self._ranks.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=checkout, env=environment, text=True
                )
            )
        self._answers(self._ranks)

    def ask(self, request: dict[str, Any], *, ranks: int = NUM_RANKS) -> Any:
        """Send a request to the first ranks, and wait for their answers. Returns: the first rank's.

        Raises:
            ValueError: a rank has ended; it has said why.
        """
        asked = self._ranks[:ranks]
        for rank in asked:
            assert rank.stdin is not None
            try:
                rank.stdin.write(json.dumps(request) + "\n")
                rank.stdin.flush()
            except BrokenPipeError:
                pass  # its answer is missing, too
        return self._answers(asked)[0]

    def _answers(self, asked: Sequence[subprocess.Popen[str]]) -> list[Any]:
        found = list[Any]()
        for rank in asked:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise ValueError(f"a rank in {self._checkout} ended; see its message above")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()

    def kill(self) -> None:
        """End the ranks at once."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


@contextmanager
def job_of(commit: str | None) -> Iterator[RankPair]:
    """The ranks of a commit, in a checkout in a temporary folder; None is this checkout as it is.

    Raises:
        ValueError: there is no such commit.
    """
    with TemporaryDirectory(prefix="runahead-commit-") as folder:
        checkout = ROOT if commit is None else Path(folder) / "checkout"
        if commit is not None:
            _check_out(commit, checkout)
        job = None
        try:
            job = RankPair(checkout)
            yield job
            job.close()
        finally:
            if job is not None:
                job.kill()


def _check_out(commit: str, folder: Path) -> None:
    command = ["git", "clone", "--quiet", "--no-checkout", "--shared", str(ROOT), str(folder)]
    subprocess.run(command, check=True)
    found = subprocess.run(
        ["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit], stderr=subprocess.PIPE
    )
    if found.returncode:
        raise ValueError(f"there is no commit {commit} in {ROOT}; see git log")
