"""Texts that a user names: files, pipes and standard input."""

from __future__ import annotations

import sys

from runahead.files import read_user_file


def read_text(path: str, name: str, *, pipes: bool = True) -> str:
    """A whole file, or standard input for "-", as text.

    Args:
        name: what messages are to call it.
        pipes: it may also be a pipe, which is waited for as standard input is.

    Raises:
        ValueError, in one line.
    """
    if not path:
        raise ValueError(f"{name} is empty; name a file")
    try:
        data = sys.stdin.buffer.read() if path == "-" else read_user_file(path, pipes=pipes)
    except FileNotFoundError as error:
        raise ValueError(f"{name} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise ValueError(f"{name} is a folder; name a file in it") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} cannot be read: {reason}; name another file") from error
    if b"\0" in data:
        raise ValueError(f"{name} is a binary file; give a text in UTF-8")
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); convert it to UTF-8 text") from error
