"""The cache folder, and folders in it that are made once: by one of several processes, whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from runahead.model.loading.quiet import one_line

WATCH_SECONDS = 0.5
"""Seconds between two updates of a progress bar."""


def cache_folder() -> Path:
    """The cache folder: RUNAHEAD_CACHE, else `runahead` in the user's cache folder."""
    if own := os.environ.get("RUNAHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "runahead"


def obtain(
    folder: Path,
    make: Callable[[Path], Path],
    *,
    label: str,
    progress: Callable[[Path], AbstractContextManager[None]] = lambda work: nullcontext(),
) -> Path:
    """Return `folder`, after making it if it does not exist. One of several processes makes it, the others wait.

    It appears complete or not at all: `make(work)` fills an empty work folder beside it, and returns the folder in
    there that is renamed. The next process removes what a killed one left.

    Args:
        label: what is made, for messages.
        progress: makes the context in which this process waits or works, from the work folder.

    Raises:
        OSError: the cache folder cannot be written, or is full.
        ValueError, OSError: from `make`.
    """
    if folder.is_dir():
        return folder
    work = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress(work), FileLock(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir():
                return folder
            shutil.rmtree(work, ignore_errors=True)
            try:
                work.mkdir()
                os.replace(make(work), folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno is None:  # the message is from `make`
            raise
        raise OSError(
            f"{label} cannot be kept in {folder.parent} ({one_line(error)}); set RUNAHEAD_CACHE to a folder with room"
        ) from error
    return folder


def require_room_for(work: Path, num_bytes: int, *, label: str) -> None:
    """Check the free space of the disk that holds `work`.

    Raises:
        OSError: it is less than `num_bytes`.
    """
    if (free := shutil.disk_usage(work).free) < num_bytes:
        raise OSError(
            f"{label} needs {num_bytes // 10**6} MB in {work.parent}, but {free // 10**6} MB are free; "
            "set RUNAHEAD_CACHE to a folder with room"
        )


@contextmanager
def progress_bar(total: int, stage: Callable[[], tuple[str, int]]) -> Iterator[None]:
    """Context manager with a progress bar, whichever process of this host does the work.

    Args:
        total: bytes of the whole work.
        stage: returns the name of what is being done, and the bytes that are done.
    """
    done, terminal = threading.Event(), sys.stderr

    def watch() -> None:
        # No rate and no time left, since some stages write nothing for a while.
        form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{elapsed}]"
        desc = f"{stage()[0]}: "
        with tqdm(total=total, unit_scale=True, desc=desc, bar_format=form, file=terminal, leave=False) as bar:
            while not done.wait(WATCH_SECONDS):
                name, num_bytes = stage()
                bar.set_description(name, refresh=False)
                bar.n = min(total, max(bar.n, num_bytes))
                bar.refresh()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def bytes_in(*folders: Path) -> int:
    """Bytes of all files in folders, which another process may be changing."""
    total = 0
    for folder in folders:
        for file in folder.rglob("*"):
            try:
                total += file.stat().st_blocks * 512 if file.is_file() else 0
            except OSError:
                continue  # gone in between
    return total
