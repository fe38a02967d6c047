"""SIGTERM and SIGHUP end a program as an error does, even while its main thread is in a long call.

Python runs the handler of a signal in the main thread, between two bytecode instructions; if the thread is in a library
call, that may be never. The signal's number is therefore also written to a file descriptor, which another thread reads.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)

GRACE_S = 3.0
"""Seconds in which the main thread may end by itself after a signal."""

SAME_S = 2.0
"""Seconds in which signals count as one: systemd signals all processes of a service, and torchrun its ranks again."""


class Terminated(BaseException):
    """A signal has asked this process to end. It is no Exception, so that handlers of errors do not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def ending_signals(when_stuck: Callable[[BaseException], object]) -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGHUP in this block. Outside the main thread the block has no effect.

    Args:
        when_stuck: called in another thread, with the exception, if the main thread has not left the block `GRACE_S`
            after such a signal or a Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if "TORCHELASTIC_RUN_ID" in os.environ and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a shell script ignores Ctrl-C, but torchrun handles it and passes it on.
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
            if signal.getsignal(number) == end:  # else they are ignored to the end of the process
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(writing)  # which ends the thread


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
    """Ignore SIGTERM, SIGHUP and SIGINT in this block."""
    numbers = [*ENDING, signal.SIGINT]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _FirstSignal:
    """Handler of a signal in a block of `first_signal`: of a block within another, the first signal is that of both.

    Args:
        around: handlers before the block, by number.
        restore: brings them back.
    """

    def __init__(
        self, call: Callable[[], object], around: Mapping[signal.Signals, object], restore: Callable[[], object]
    ) -> None:
        self._call, self._around, self._restore = call, around, restore
        outer = next((each for each in around.values() if isinstance(each, _FirstSignal)), None)
        self.first_s: float | None = None if outer is None else outer.first_s

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic()
            self._call()
            if isinstance(outer := self._around[signal.Signals(number)], _FirstSignal):
                outer(number, frame)
        elif time.monotonic() - self.first_s > SAME_S:
            self._restore()
            signal.raise_signal(number)


@contextmanager
def first_signal(call: Callable[[], object], *, is_last: bool = False) -> Iterator[None]:
    """Call `call` at the first SIGTERM, SIGHUP or Ctrl-C in this block; one that comes later ends it as elsewhere.

    Outside the main thread the block has no effect. A signal that came in a block around this one is not the first.

    Args:
        is_last: nothing comes after the block but the end of the process. Unless it raises an error these signals are
            ignored from then on, as what they ask for is there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [*ENDING, signal.SIGINT]
    handlers = {number: signal.getsignal(number) for number in numbers}
    # Without it, the thread of `ending_signals` does not see the signals, and does not end the process after one.
    before = signal.set_wakeup_fd(-1)

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)

    handle = _FirstSignal(call, handlers, restore)
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
        if is_last:
            handlers = dict.fromkeys(numbers, signal.SIG_IGN)
    finally:
        restore()
