"""The ranks of one commit, in a checkout of it, which measure one request after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.line_processes import LineProcesses, rank_environments
from benchmarks.harness.machine import ROOT

NUM_RANKS = 2
RANK = Path("benchmarks/studies/commits/rank.py")
KERNELS = Path("launch/kernels.py")
"""The program that builds a commit's kernels."""


class RankPair(LineProcesses):
    """Two ranks of one thread each.

    Attributes:
        kernels: as of `built_kernels`.

    Args:
        checkout: folder of the commit. Its own `rank.py` runs, which knows its modules; an older commit that has none
            runs this checkout's.
        program: what a rank runs, a path in the checkout.
    """

    def __init__(self, checkout: Path, *, program: Path = RANK) -> None:
        own = checkout / program
        self.kernels = built_kernels(checkout)
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


def built_kernels(checkout: Path) -> bool | None:
    """Build a commit's kernels of attention on CPUs, if it has any, before it is measured.

    Returns:
        whether they are built; None: it has none.
    """
    if not (checkout / KERNELS).is_file():
        return None
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, str(KERNELS)], cwd=checkout, env=environment, capture_output=True)
    return done.returncode == 0


def require_like_kernels(kernels: Mapping[str, bool | None]) -> None:
    """Check that of the commits that have kernels all are measured with them, or none.

    Args:
        kernels: `built_kernels` of each.

    Raises:
        ValueError: which have none.
    """
    if {True, False} <= set(kernels.values()):
        without = ", ".join(name for name, has in kernels.items() if has is False)
        raise ValueError(
            f"kernels cannot be built in the checkout that is called {without}, and the other has them; see what "
            "python -m launch.kernels says there"
        )


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
