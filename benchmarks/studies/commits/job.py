"""The ranks of one commit, in a checkout of it, which measure one request after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.line_processes import LineProcesses, rank_environments
from benchmarks.harness.machine import ROOT

NUM_RANKS = 2
RANK = Path("benchmarks/studies/commits/rank.py")


class RankPair(LineProcesses):
    """Two ranks of one thread each.

    Args:
        checkout: folder of the commit. Its own `rank.py` runs, which knows its modules; an older commit that has none
            runs this checkout's.
        program: what a rank runs, a path in the checkout.
    """

    def __init__(self, checkout: Path, *, program: Path = RANK) -> None:
        own = checkout / program
        super().__init__(
            [sys.executable, str(own if own.is_file() else ROOT / program)],
            rank_environments(NUM_RANKS, threads=1, checkout=checkout),
            cwd=checkout,
            what=f"a rank in {checkout}",
        )


@contextmanager
def job_of(commit: str | None) -> Iterator[RankPair]:
    """The ranks of a commit, in a checkout of it. Raises: ValueError: there is no such commit."""
    with checkout_of(commit) as checkout:
        job = None
        try:
            job = RankPair(checkout)
            yield job
            job.close()
        finally:
            if job is not None:
                job.kill()


@contextmanager
def checkout_of(commit: str | None) -> Iterator[Path]:
    """A checkout of a commit in a temporary folder; None is this checkout as it is.

    Raises:
        ValueError: there is no such commit.
    """
    with TemporaryDirectory(prefix="runahead-commit-") as folder:
        checkout = ROOT if commit is None else Path(folder) / "checkout"
        if commit is not None:
            _check_out(commit, checkout)
        yield checkout


def _check_out(commit: str, folder: Path) -> None:
    command = ["git", "clone", "--quiet", "--no-checkout", "--shared", str(ROOT), str(folder)]
    subprocess.run(command, check=True)
    found = subprocess.run(
        ["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit], stderr=subprocess.PIPE
    )
    if found.returncode:
        raise ValueError(f"there is no commit {commit} in {ROOT}; see git log")
