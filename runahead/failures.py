"""What ends a rank's work that is not its own mistake."""

from __future__ import annotations


class PeerFailure(RuntimeError):
    """A peer is silent, gone, or announced that it failed. The message names it and what was waited for."""


class SharedError(RuntimeError):
    """Another rank reports this error; this one only ends."""


def first_line(error: BaseException) -> str:
    """What an error says, on one line; its type's name if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
