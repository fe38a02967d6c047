"""Threads in which bodies of requests are read: JSON, templates, tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

from launch.server.errors import APIError
from launch.server.request.bodies import disconnected

T = TypeVar("T")

SHORT_BYTES = 2**16
"""Longest body that does not wait for longer ones to be read."""
THREADS = {True: 1, False: 2}
"""Threads for short bodies, and for others."""
REST = 2.0
"""Times as long as a long body was read until it was refused, no other such refusal is told."""
LONGEST_REST_S = 2.0


class Readers:
    """Threads that read short bodies, and others.

    What is taken costs a prefill, which the limits of the queue bound. What is refused costs reading alone, and its
    client could send the next one at once; so refusals of long bodies are told one after another, each some time after
    the one before. Their clients wait, and neither the threads nor who else has a long body.
    """

    def __init__(self) -> None:
        self._pools = {
            is_short: ThreadPoolExecutor(threads, thread_name_prefix="reader") for is_short, threads in THREADS.items()
        }
        self._told_s = -math.inf

    async def run(self, num_bytes: int, read: Callable[[], T]) -> T:
        """Read a body of this length in a thread. Raises: what `read` raises; an error of the API has its rest."""
        is_short, took_s = num_bytes <= SHORT_BYTES, list[float]()

        def timed() -> T:
            began_s = time.monotonic()
            try:
                return read()
            finally:
                took_s.append(time.monotonic() - began_s)

        try:
            return await asyncio.wrap_future(self._pools[is_short].submit(timed))
        except APIError as error:
            if not is_short:
                error.rest_s = self._rest_s(took_s[0])
            raise

    def _rest_s(self, took_s: float) -> float:
        """Seconds until the next refusal is told, of a body that was read for so long."""
        now_s = time.monotonic()
        self._told_s = max(now_s, self._told_s) + min(LONGEST_REST_S, REST * took_s)
        return self._told_s - now_s


async def rested(seconds: float, receive: Receive) -> None:
    """Wait for so long, or until the client has gone."""
    with suppress(TimeoutError):
        await asyncio.wait_for(disconnected(receive), seconds)
