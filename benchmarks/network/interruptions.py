"""Handling of Ctrl-C, SIGTERM and a closed terminal: raise like exceptions, or be deferred during a change.

Python runs signal handlers in the main thread only, so both context managers do nothing in other threads.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise SystemExit(128 + number) in this block on signals that would end the process at once."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    replaced = [n for n in ENDING if _in_main_thread() and signal.getsignal(n) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_deferred() -> Iterator[list[int]]:
    """Defer signals that arrive in this block to its end. Yields the numbers of those that have arrived.

    A block that waits looks at them and ends, since an exception that is raised anywhere may do harm: in the middle of
    `Popen.poll()` it leaves a lock behind that `Popen.wait()` takes.
    """
    received: list[int] = []
    replaced = {}
    for number in (signal.SIGINT, *ENDING):
        if _in_main_thread() and callable(handler := signal.getsignal(number)):
            replaced[number] = handler
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
