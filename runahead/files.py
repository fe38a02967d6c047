"""Reading any file that a user names, and writing files completely or not at all.

A file that is read is never waited for, and does not fill the memory. A file that is written is filled under another
name, or under none where the system can (O_TMPFILE on Linux's usual file systems), and then takes its name.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**30
PART_BYTES = 2**20


def read_user_file(path: str | os.PathLike[str], *, pipes: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        pipes: also of a pipe, which is waited for as standard input is.

    Raises:
        OSError: it cannot be read, is something else, or is larger than a GiB.
        ValueError: no file can have this name.
    """
    about = os.stat(path)
    mode = about.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    parts: list[bytes] = []
    size = about.st_size
    try:
        with open(path, "rb") as file:
            while size <= MOST_BYTES and (part := file.read(PART_BYTES)):
                parts.append(part)
                size = max(size, len(parts) * PART_BYTES)  # of a pipe nobody knows it before
    except OSError as error:
        error.filename = os.fspath(path)  # which the system does not know where reading fails
        raise
    if size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES // 2**20:,} MiB", os.fspath(path))
    return b"".join(parts)


def ensure_writable(path: str | os.PathLike[str], *, option: str = "report") -> None:
    """Find out before any work whether `write_whole(path, ...)` can succeed; leaves nothing behind.

    Raises: ValueError, naming the command line's `option`, if the file could not be written.
    """
    name = f"{option}={os.fspath(path)}"
    if not os.fspath(path):
        raise ValueError(f"{option}= is empty; name a file")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL, or half a character
        raise ValueError(f"{name} is no name that a file can have; name another file") from error
    try:
        if target.is_dir():
            raise ValueError(f"{name} is a folder; name a file in it")
        if not target.parent.is_dir():
            raise ValueError(f"{name}: there is no folder {target.parent}; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise ValueError(f"{name} is read-only; name another file")
        if target.exists() and not target.is_file():
            return  # a device or a pipe: there is no folder to try
        # Permission bits do not tell: root passes them, a read-only file system is not in them.
        trial, handle = _create_beside(target)
        os.close(handle)
        trial.unlink()
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}; name another file") from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`; if that fails, a file that was there keeps its content.

    Raises: OSError.
    """
    try:
        _write(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        if error.errno is not None:
            error.filename = os.fspath(path)  # which the system does not know where a disk is full
        raise


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    # A link keeps pointing where it did. Devices and pipes (report=/dev/stderr) must not be replaced by a
    # file.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        Path(path).write_bytes(data)
        return
    if not _write_unnamed(target, data):
        _write_beside(target, data)


def _write_unnamed(target: Path, data: bytes) -> bool:
    """Fill a file that has no name yet, so that a process that is killed meanwhile leaves nothing.

    But for the moment between two system calls, where it takes the place of another file.

    Returns: whether this system has such files.
    """
    try:
        handle = os.open(target.parent, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):  # what is wrong with the folder shows again beside the target
        return False
    part = _beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, data, target)
            try:
                _give_name(handle, target)
                return True
            except FileExistsError:  # a name can be given to a file, but not taken from another one in one step
                _give_name(handle, part)
        os.replace(part, target)
        return True
    except _NoNames:
        return False
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _NoNames(Exception):
    """The file system does not give a name to a file that was made without one."""


def _give_name(handle: int, path: Path) -> None:
    try:
        # With a descriptor beside it Python has the link to the open file followed; an absolute path needs none.
        os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle)
    except FileExistsError:
        raise
    except OSError as error:
        raise _NoNames from error


def _write_beside(target: Path, data: bytes) -> None:
    part, handle = _create_beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            _fill(file, data, target)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _fill(file: BinaryIO, data: bytes, target: Path) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    if target.exists():
        os.fchmod(file.fileno(), target.stat().st_mode & 0o777)


def _beside(target: Path) -> Path:
    return target.parent / f".{secrets.token_hex(6)}.part"


def _create_beside(target: Path) -> tuple[Path, int]:
    """A new file beside `target`, and its open descriptor; unlike tempfile's it has the usual permissions."""
    part = _beside(target)
    return part, os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
