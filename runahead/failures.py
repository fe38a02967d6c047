"""Errors of a rank whose cause is on another rank."""

from __future__ import annotations


class PeerFailure(RuntimeError):
    """A peer is silent, has ended, or announced a failure. The message names it and what this rank waited for."""


class SharedError(RuntimeError):
    """An error that another rank reports. This rank ends too, without reporting it again."""


def first_line(error: BaseException) -> str:
    """First line of an error's message that is not blank; the name of its type if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
