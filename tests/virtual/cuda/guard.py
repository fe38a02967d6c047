"""The C++ part of the virtual GPU: compiled once per version of torch, into the cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from runahead.files import cache_folder
from runahead.model.loading.cache_folder import obtain
from tests.needs import missing

FOLDER = "virtual-gpu"
"""The folder for it in the cache folder."""

SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """The C++ compiler: CXX, else the first that is found."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


@functools.cache
def load_guard() -> None:
    """Give this process a guard of CUDA devices, which stays: torch cannot take one away, and nobody else asks for it.

    Raises:
        ValueError: there is no C++ compiler.
        OSError: it does not compile, or the cache folder cannot be written.
    """
    key = hashlib.sha256(f"{torch.__version__} {SOURCE.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    folder = obtain(cache_folder() / FOLDER / key, _compile, label="the virtual GPU's library", has="libguard.so")
    torch.ops.load_library(str(folder / "libguard.so"))


def require_guard() -> None:
    """Load the guard, for tests: they lack something where there is no compiler (tests/needs.py)."""
    try:
        load_guard()
    except ValueError as error:
        missing(str(error))


def _compile(work: Path) -> Path:
    found = compiler()
    if found is None:
        raise ValueError("the virtual GPU needs a C++ compiler; install g++, or set CXX")
    home = Path(torch.__file__).parent
    command = [found, "-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}", str(SOURCE)]
    command += ["-o", str(work / "libguard.so"), f"-L{home / 'lib'}", "-lc10"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise OSError(f"{SOURCE.name} does not compile with {found}: {made.stderr.strip()}")
    return work
