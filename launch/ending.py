"""How a program says what went wrong, and ends: one line, a status, and no waiting for a broken process group."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from launch.compose import this_rank

if TYPE_CHECKING:
    from runahead.ranks import Ranks


def say(message: str) -> None:
    """A line on standard error, once per job."""
    if this_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def end_with(error: BaseException, ranks: Ranks | None) -> NoReturn:
    """Say in one line why this rank ends, tell the others, and leave at once.

    At once: the threads of a broken process group may hang for ever, and Python would wait for them.
    """
    from runahead.ranks import PeerFailure, SharedError

    size = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks.size
    label = f"[rank {this_rank()}/{size}] " if size > 1 else ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    status = 1
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        if ranks is not None:
            ranks.fail("interrupted")
        status = 130
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    elif not isinstance(error, SharedError):
        if not isinstance(error, ValueError | OSError | PeerFailure):
            reason = f"{type(error).__name__}: {reason}"
        print(f"{label}{reason}", file=sys.stderr, flush=True)
        if ranks is not None and not isinstance(error, PeerFailure):
            ranks.fail(reason)
    if os.environ.get("RUNAHEAD_TRACEBACK") == "1":
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
