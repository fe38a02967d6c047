"""Reads the bodies of requests, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.types import Receive

from launch.server.errors import APIError
from launch.server.options import ServeOptions

BODIES = 8
"""Bodies of the largest size that may be read at a time."""
DISCARD_S = 2.0
"""Seconds for which the body of a refused request is read."""


class Bodies:
    """The bodies that a server reads at a time.

    Args:
        options: the limits.

    Attributes:
        num_bytes: of them, so far.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options, self.num_bytes = options, 0

    @asynccontextmanager
    async def read(self, request: HTTPRequest) -> AsyncIterator[bytes]:
        """The body, within the limits of size and time. It counts as being read until the block ends."""
        limit, size, parts = self._options.max_body_bytes, 0, list[bytes]()
        declared = request.headers.get("content-length", "0")
        too_large = APIError(413, f"the body is larger than {limit:,} bytes", code="request_too_large")
        if not declared.isdecimal() or int(declared[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._options.read_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    self.num_bytes += len(part)
                    parts.append(part)
                    if size > limit:
                        raise too_large
                    if self.num_bytes > BODIES * limit:
                        message, later = "too many large requests are being read", {"retry-after": "1"}
                        raise APIError(429, message, code="rate_limit_exceeded", headers=later)
            yield b"".join(parts)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._options.read_timeout_s:g} s"
            raise APIError(408, message, code="request_timeout") from error
        finally:
            self.num_bytes -= size

    async def discarded(self, request: HTTPRequest) -> bool:
        """Read what is left of a refused body; whether all was read. Closing at once might lose the answer."""
        size = 0
        with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: it was read before
            async with asyncio.timeout(DISCARD_S):
                async for part in request.stream():
                    size += len(part)
                    if size > BODIES * self._options.max_body_bytes:
                        return False
        return request._stream_consumed


async def disconnected(receive: Receive) -> None:
    """Wait until the client of a request whose body was read has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
