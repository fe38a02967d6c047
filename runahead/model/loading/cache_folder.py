"""Folders of the cache folder that are made once: by one of several processes, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from runahead.model.loading.quiet import one_line

WATCH_SECONDS = 0.5
"""Seconds between two updates of a progress bar."""

ABANDONED_S = 24 * 3600
"""Seconds without a change after which another host's work folder counts as what a killed process left."""


def obtain(
    folder: Path,
    make: Callable[[Path], Path],
    *,
    label: str,
    has: str = "",
    progress: Callable[[Path], AbstractContextManager[None]] = lambda work: nullcontext(),
) -> Path:
    """Return `folder`, after making it if it does not exist. One of several processes makes it, the others wait.

    It appears complete or not at all: `make(work)` fills an empty work folder beside it, and returns the folder in
    there that is renamed once it is on the disk. The next process removes what a killed one left. Hosts that share the
    cache folder may share no locks, so each has a work folder of its own, and the first that is ready wins.

    Args:
        label: what is made, for messages.
        has: a file of the folder. Without it, as who clears old files away leaves it, the folder is made anew.
        progress: makes the context in which this process waits or works, from the work folder.

    Raises:
        OSError: the cache folder cannot be written, or is full.
        ValueError, OSError: from `make`.
    """
    if (folder / has).exists():
        return folder
    work = work_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress(work), FileLock(folder.with_name(f"{folder.name}.lock")):
            if (folder / has).exists():
                return folder
            shutil.rmtree(folder, ignore_errors=True)  # it lacks the file
            _remove_remains(folder)
            try:
                work.mkdir()
                made = make(work)
                _write_out(made)
                _put(made, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno is None:  # the message is from `make`
            raise
        raise OSError(
            f"{label} cannot be kept in {folder.parent} ({one_line(error)}); set RUNAHEAD_CACHE to a folder with room"
        ) from error
    return folder


def work_folder(folder: Path) -> Path:
    """The folder in which this host makes `folder`, before it is renamed."""
    return folder.with_name(f"{folder.name}.{socket.gethostname()}.partial")


def _remove_remains(folder: Path) -> None:
    """Remove work folders that killed processes left: this host's, and those of others that changed long ago."""
    for work in folder.parent.glob(f"{folder.name}.*partial"):
        if work == work_folder(folder) or time.time() - _changed_s(work) > ABANDONED_S:
            shutil.rmtree(work, ignore_errors=True)


def _changed_s(folder: Path) -> float:
    """Time of the last change in a folder, which another host may be filling."""
    last_s = 0.0
    for path in [folder, *folder.rglob("*")]:
        with suppress(OSError):  # gone in between
            last_s = max(last_s, path.stat().st_mtime)
    return last_s


def _write_out(folder: Path) -> None:
    """Wait until a folder is on the disk: a crash after the rename would otherwise leave it with empty files."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL or not path.is_dir():  # some mounts cannot do this for folders
                raise
        finally:
            os.close(handle)


def _put(made: Path, folder: Path) -> None:
    try:
        os.replace(made, folder)
    except OSError:
        if not folder.is_dir():  # another host was faster
            raise


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
