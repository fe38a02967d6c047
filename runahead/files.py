"""Safe reading of files that a user names, atomic writing of files, and lines that a stopped run goes on from.

Reading neither blocks (on a pipe, say) nor fills the memory. A file is written under another name, or without a name
where the file system supports that (O_TMPFILE on Linux), and then renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

MOST_BYTES = 2**30
"""Size of the largest file that is read."""
PART_BYTES = 2**20
"""Bytes that are read at a time."""
PART = ".part"
"""End of the names of files that are not finished."""
EMPTY_S = 60.0
"""Age in seconds from which an unfinished file that is empty belongs to no process."""

Content: TypeAlias = str | bytes | Callable[[BinaryIO], object]
"""Content of a file, text as UTF-8, or what writes it: at its own pace, and anew if it is called again."""


class KeptLines:
    """Findings in a file of JSON lines, each appended as soon as it is known, so that a stopped run can go on.

    Lines of another `purpose` stay in the file and are not used. A last line that was cut off, and any that is not of
    this form, is ignored.

    Args:
        path: the file; None keeps nothing.
        purpose: what the findings are valid for.
    """

    def __init__(self, path: Path | None, purpose: Mapping[str, Any]) -> None:
        self._path, self._purpose = path, dict(purpose)
        self._is_cut = False  # the file's last line has no end

    def read(self) -> Iterator[dict[str, Any]]:
        """Lines of earlier runs. Raises: OSError: the file cannot be read."""
        if self._path is None or not self._path.exists():
            return
        text = read_user_file(self._path).decode("utf-8", errors="replace")
        self._is_cut = bool(text) and not text.endswith("\n")
        for line in text.split("\n"):
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict) and found.get("purpose") == self._purpose:
                    yield found

    def add(self, **found: Any) -> None:
        """Append a line. Raises: OSError."""
        if self._path is None:
            return
        line = json.dumps({"purpose": self._purpose, **found}) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + line if self._is_cut else line)
        self._is_cut = False


def read_user_file(path: str | os.PathLike[str], *, pipes: bool = False) -> bytes:
    """Read a regular file.

    Args:
        pipes: allow a pipe too, and wait for it as for standard input.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than `MOST_BYTES`.
        ValueError: no file can have this name.
    """
    about = os.stat(path)
    mode = about.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    parts: list[bytes] = []
    size = about.st_size
    try:
        with open(path, "rb") as file:
            while size <= MOST_BYTES and (part := file.read(PART_BYTES)):
                parts.append(part)
                size = max(size, len(parts) * PART_BYTES)  # the size of a pipe is not known before
    except OSError as error:
        error.filename = os.fspath(path)  # an error of read() lacks it
        raise
    if size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES // 2**20:,} MiB", os.fspath(path))
    return b"".join(parts)


def digest_of_path(path: Path) -> str:
    """Digest of a file, or of the files of a folder: 16 hexadecimal digits. Raises: OSError."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(hashlib.sha256(each.read_bytes()).digest() for each in files)).hexdigest()[:16]


def ensure_writable(path: str | os.PathLike[str], *, option: str = "report") -> None:
    """Check, before any work, that `write_whole(path, ...)` can succeed. No file is created or changed.

    Args:
        option: the command line's option that holds the path, for messages.

    Raises:
        ValueError: the file could not be written.
    """
    name = f"{option}={os.fspath(path)}"
    if not os.fspath(path):
        raise ValueError(f"{option}= is empty; name a file")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL, or an incomplete character
        raise ValueError(f"{name} is not a name that a file can have; name another file") from error
    try:
        if target.is_dir():
            raise ValueError(f"{name} is a folder; name a file in it")
        if not target.parent.is_dir():
            raise ValueError(f"{name}: there is no folder {target.parent}; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise ValueError(f"{name} is read-only; name another file")
        if target.exists() and not target.is_file():
            return  # a device or a pipe is written directly
        # Permission bits do not suffice: root ignores them, and they do not show a read-only file system.
        trial = _beside(target)
        os.close(_create(trial))
        trial.unlink()
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}; name another file") from error


def write_whole(path: str | os.PathLike[str], content: Content, *, mode: int = 0o666) -> None:
    """Write `content` to `path` atomically: if that fails, an existing file keeps its content.

    Args:
        mode: most permissions of a new file.

    Raises:
        OSError: the file cannot be written.
        Exception: whatever `content` raises.
    """
    # Follows links, so that they stay links. Devices and pipes (report=/dev/stderr) must not be replaced by a file.
    target = Path(os.path.realpath(path))
    part = _beside(target)
    try:
        if target.exists() and not target.is_file():
            with open(path, "wb") as file:
                _write(file, content)
        elif not _write_unnamed(target, part, content, mode):
            with os.fdopen(_create(part, mode), "wb") as file:
                _fill(file, content, target)
                os.replace(part, target)  # while the file is locked
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = os.fspath(path)  # an error of write() lacks it
        raise


def _write_unnamed(target: Path, part: Path, content: Content, mode: int) -> bool:
    """Write a file without a name, and name it at the end, so that a killed process leaves no partial file.

    Only if it replaces another file, the temporary name `part` exists for the moment between two system calls.

    Returns:
        Whether the file system supports files without a name; if not, nothing was written.
    """
    try:
        handle = os.open(target.parent, os.O_WRONLY | os.O_TMPFILE, mode)
    except (AttributeError, OSError):  # an error of the folder occurs again when `part` is created
        return False
    with os.fdopen(handle, "wb") as file:
        _fill(file, content, target)
        for path in (target, part):
            try:
                # src_dir_fd makes Python follow the symbolic link in /proc; it has no effect on an absolute path
                # otherwise.
                os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=handle)
            except FileExistsError:  # link() does not replace a file, rename() does
                continue
            except OSError:
                return False
            if path == part:
                os.replace(part, target)
            return True
    return False


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes have left of files that `write_whole` did not finish in a folder.

    Files that a process still writes are locked, or empty for the moment before they are.
    """
    for part in folder.glob(f".*{PART}"):
        with suppress(OSError), open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(file.fileno())
            if about.st_size or about.st_mtime < time.time() - EMPTY_S:
                part.unlink()


def _fill(file: BinaryIO, content: Content, target: Path) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    _write(file, content)
    file.flush()
    os.fsync(file.fileno())
    if target.exists():
        os.fchmod(file.fileno(), target.stat().st_mode & 0o777)


def _write(file: BinaryIO, content: Content) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content.encode() if isinstance(content, str) else content)


def _beside(target: Path) -> Path:
    return target.parent / f".{secrets.token_hex(6)}{PART}"


def _create(path: Path, mode: int = 0o666) -> int:
    """Create a file, by default with the usual permissions, unlike tempfile; returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def cache_folder() -> Path:
    """The cache folder: RUNAHEAD_CACHE, else `runahead` in the user's cache folder."""
    if own := os.environ.get("RUNAHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "runahead"
