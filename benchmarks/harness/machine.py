"""Description of the machine and of the code that was measured."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from partitioner.table.fingerprint import device_name, now
from runahead.model.loading.kernels import lacking as lacking_kernels
from runahead.ranks.agreement import code_files
from runahead.report import library_versions

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""Lines that tables and pages of the repository are made from."""
MEASURED = ("runahead", "policies", "partitioner")
"""Packages whose code is measured."""
DIRTY = "-dirty"
"""End of the commit of a checkout with uncommitted changes."""


def about() -> dict[str, Any]:
    """Fields that every measured line has: date, commit, code, hardware and versions."""
    return {
        "date": now(),
        "commit": commit(),
        "code": code(),
        "hardware": hardware(),
        "versions": library_versions(),
    }


def hardware() -> dict[str, Any]:
    """This host: processor, number of cores, memory in GiB, GPUs."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": f"{device_name(torch.device('cpu'))} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpus,
    }


def free_port() -> int:
    """A port that is free now on this host."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def commit() -> str | None:
    """Commit of the checkout, with "-dirty" if a file was changed other than results and pages, which runs change."""
    described = _git("describe", "--always")
    if described is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return described + (DIRTY if changed else "")


def require_known_code(path: str | os.PathLike[str], *, remedy: str) -> None:
    """Check that lines of the repository are of a commit; lines elsewhere may be of any code.

    Args:
        path: file of lines that a run appends to.
        remedy: the options that say otherwise.

    Raises:
        ValueError: the file is in benchmarks/results, and its lines could not tell which code they were measured with.
    """
    if Path(path).resolve().parent != RESULTS:
        return
    known = commit()
    if known is None or known.endswith(DIRTY):
        told = "has no commit" if known is None else f"is {known}, with uncommitted changes"
        raise ValueError(
            f"the checkout {told}, so lines in benchmarks/results would not tell which code was measured; commit "
            f"the changes first, or give {remedy}"
        )


def code(packages: Sequence[str] = MEASURED) -> str:
    """Digest of the measured code. Unlike a commit it distinguishes checkouts with uncommitted changes."""
    digest = hashlib.sha256()
    for path in code_files(ROOT, packages):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def has_kernels() -> bool:
    """Whether runs on this host's processors take the kernels of our own."""
    return not lacking_kernels()


def _git(*args: str) -> str | None:
    try:
        run = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None
    return run.stdout.strip()
