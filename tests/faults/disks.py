"""Disks that are full or read-only: small ones of our own, in memory; needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 1 << 16


@contextmanager
def disk(folder: Path, kind: str) -> Iterator[Path]:
    """A file system at `folder` that is full or read-only.

    Raises:
        PermissionError: this user, or this container, may not mount.
    """
    folder.mkdir()
    options = "ro" if kind == "read-only folder" else f"size={SIZE}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())
    try:
        if kind == "full disk":
            fill(folder / "filling")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=True)


def fill(path: Path) -> None:
    """Write until there is no room."""
    try:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        return
