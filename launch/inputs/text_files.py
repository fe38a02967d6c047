"""Texts that a user names: files, pipes and standard input."""

from __future__ import annotations

import sys

from launch.program.compose import ROOT
from runahead.files import read_user_file

EXAMPLE_TEXT = "examples/frankenstein_letters.txt"
"""Text that programs read if the user names none, below the folder of the packages."""


def text_or_example(path: str | None, option: str) -> tuple[str, str]:
    """Name and content of the text that an option names, or of the example.

    Raises:
        ValueError: in one line.
    """
    if path is not None:
        return f"{option}={path}", read_text(path, f"{option}={path}")
    example = ROOT / EXAMPLE_TEXT
    if not example.is_file():
        raise ValueError(f"a text is needed and {EXAMPLE_TEXT} is not there; use {option}=<text in UTF-8>")
    return EXAMPLE_TEXT, read_text(str(example), EXAMPLE_TEXT)


def read_text(path: str, name: str, *, pipes: bool = True) -> str:
    """Read a whole file, or standard input for "-", as text.

    Args:
        name: name of the file for messages.
        pipes: whether the file may be a pipe, which is read to its end as standard input is.

    Raises:
        ValueError: in one line.
    """
    if not path:
        raise ValueError(f"{name} is empty; name a file")
    if path == "-" and sys.stdin is None:
        raise ValueError(f"{name} cannot be read: standard input is closed; name a file, or pipe a text in")
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
