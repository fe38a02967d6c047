"""Errors of a rank: whose cause is on another rank, whose cause is in a file of the user's own, and their lines."""

from __future__ import annotations

import traceback


class RunFailure(RuntimeError):
    """Nothing that the user wrote is wrong, and yet the run cannot go on. The message says all that there is to say."""


class PeerFailure(RunFailure):
    """A peer is silent, has ended, or announced a failure. The message names it and what this rank waited for."""


class SharedError(RuntimeError):
    """An error that another rank reports. This rank ends too, without reporting it again.

    Args:
        is_mistake: whether it is a user's mistake, which is a ValueError on that rank.
    """

    def __init__(self, message: str, *, is_mistake: bool = False) -> None:
        super().__init__(message)
        self.is_mistake = is_mistake


USERS_FILE = "__users_file__"
"""Global variable of a module that the user wrote: the option that names its file."""

WRONG_PATH = FileNotFoundError | FileExistsError | IsADirectoryError | NotADirectoryError | PermissionError
"""Errors of paths, which the user names."""

LONGEST_MESSAGE = 4000
"""Characters; paths and values of users are in a message."""

NO_MEMORY = ("allocate memory", "bad_alloc", "out of memory", "start new thread")
"""Words of the errors that PyTorch, C++ and Python raise when memory runs out."""


def line_of(error: BaseException) -> str:
    """One line on an error; if it came through a file of the user's own, with the last place there."""
    reason, place = first_line(error), users_place(error)
    if place is None:
        return reason
    what = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
    return f"{place}: {what}; RUNAHEAD_TRACEBACK=1 prints the traceback"


def is_mistake(error: BaseException) -> bool:
    """Whether an error is a mistake in what the user wrote."""
    if isinstance(error, SharedError):
        return error.is_mistake
    return isinstance(error, ValueError | WRONG_PATH) or users_place(error) is not None


def is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in first_line(error).lower() for words in NO_MEMORY)


def users_place(error: BaseException | None) -> str | None:
    """The last line of the user's own files that an error came through, as "policy.path=mine.py line 7 in keep".

    None if there is none, or if that line is not at fault: for a signal, a failure of another rank, a lack of memory.
    """
    blameless = PeerFailure | SharedError
    while isinstance(error, Exception) and not isinstance(error, blameless) and not is_lack_of_memory(error):
        places = [
            f"{option} line {number} in {frame.f_code.co_name}"
            for frame, number in traceback.walk_tb(error.__traceback__)
            if (option := frame.f_globals.get(USERS_FILE)) is not None
        ]
        if places:
            return places[-1]
        error = error.__cause__
    return None


def first_line(error: BaseException) -> str:
    """First line of an error's message that is not blank, cut short; the name of its type if there is none."""
    return cut_short(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))


def cut_short(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """A message without its middle where it quotes so much of a file that nobody would read it; remedies are last."""
    if len(message) <= longest:
        return message
    kept = longest // 2
    return f"{message[:kept]} [...] {message[-kept:]}"
