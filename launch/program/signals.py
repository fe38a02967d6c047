"""SIGTERM and SIGHUP end a program as an error does, with its one line, also where its main thread is in a long call.

Python runs a signal's handler in the main thread once that is between two of its own steps, which inside a call of a
library may be never. The number of a signal is also written to a descriptor at once, which another thread reads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)

GRACE_S = 3.0
"""Seconds in which the main thread may end by itself."""


class Terminated(BaseException):
    """A signal asks this process to end. As with KeyboardInterrupt, nothing that handles errors should swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def ending_signals(when_stuck: Callable[[BaseException], object]) -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise `Terminated`; elsewhere than in the main thread the block changes nothing.

    Args:
        when_stuck: called in another thread, with the exception, where the main thread has not ended `GRACE_S` after
            one of them or a Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if "TORCHELASTIC_RUN_ID" in os.environ and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Jobs in the background of a script ignore Ctrl-C. But torchrun does not, and passes it on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    replaced = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in replaced:
        signal.signal(number, end)
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(reading, is_over, when_stuck), name="signals", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(writing)  # and the thread ends


def _watch(reading: int, is_over: threading.Event, when_stuck: Callable[[BaseException], object]) -> None:
    try:
        while data := os.read(reading, 1):
            if data[0] in (*ENDING, signal.SIGINT):
                if not is_over.wait(GRACE_S):
                    when_stuck(KeyboardInterrupt() if data[0] == signal.SIGINT else Terminated(data[0]))
                return
    finally:
        os.close(reading)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """In this block none of them interrupts what is being done."""
    numbers = [*ENDING, signal.SIGINT]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    handlers = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
