"""Threads in which bodies of requests are read: JSON, templates, tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from launch.server.errors import APIError

T = TypeVar("T")

SHORT_BYTES = 2**16
"""Longest body that does not wait for longer ones to be read."""
THREADS = {True: 1, False: 2}
"""Threads for short bodies, and for others."""
REST = 3.0
"""Times as long as a long body was read until it was refused, its thread rests."""
LONGEST_REST_S = 1.0


class Readers:
    """Threads that read short bodies, and others.

    What is taken costs a prefill, which the limits of the queue bound. What is refused costs reading alone, and its
    client may send the next one at once; threads of long bodies rest after it, so that others have the processor.
    """

    def __init__(self) -> None:
        self._pools = {
            is_short: ThreadPoolExecutor(threads, thread_name_prefix="reader") for is_short, threads in THREADS.items()
        }

    async def run(self, num_bytes: int, read: Callable[[], T]) -> T:
        """What is read of a body of this length. Raises: what `read` raises."""
        found, is_short = Future[T](), num_bytes <= SHORT_BYTES
        self._pools[is_short].submit(_read if is_short else _read_and_rest, found, read)
        return await asyncio.wrap_future(found)


def _read(found: Future[T], read: Callable[[], T]) -> BaseException | None:
    """Read, unless nobody waits for it any more. Returns what was raised."""
    if not found.set_running_or_notify_cancel():
        return None
    try:
        found.set_result(read())
    except BaseException as error:
        found.set_exception(error)
        return error
    return None


def _read_and_rest(found: Future[T], read: Callable[[], T]) -> None:
    began_s = time.monotonic()
    if isinstance(_read(found, read), APIError):
        time.sleep(min(LONGEST_REST_S, REST * (time.monotonic() - began_s)))
