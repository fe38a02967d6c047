"""Reading a file that a user names: it may be anything, and is neither waited for nor does it fill the memory."""

from __future__ import annotations

import errno
import os
import stat

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
