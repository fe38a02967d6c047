"""Clients' packages, from the package index into environments of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

INSTALL_S = 400


def installed(package: str, folder: Path, *, sees_ours: bool = False) -> Path:
    """The folder of programs of a new environment that has a package. The test is skipped if it does not install.

    Args:
        folder: of the environment.
        sees_ours: packages of this process's environment are there, too, and are not installed again.
    """
    venv.create(folder)
    programs = folder / "bin"
    if sees_ours:
        [site] = folder.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", f"--python={programs / 'python'}", "--disable-pip-version-check"]
    try:
        done = subprocess.run([*pip, "install", "-q", package], capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} did not install in {INSTALL_S} s")
    if done.returncode:
        pytest.skip(f"{package} does not install here: {done.stderr.strip().splitlines()[-1:]}")
    return programs
