"""The HTTP server: uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from launch.server.connection import connection_type
from launch.server.options import ServeOptions
from runahead.failures import first_line

KEEP_ALIVE_S = 30
"""Seconds for which a connection without a request is kept."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket of this address, which does not listen yet. Raises: ValueError: it cannot be used."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        remedy = "use another serve.port or serve.host"
        raise ValueError(f"cannot listen on serve.host={host} serve.port={port}: {reason}; {remedy}") from error
    return bound


class HTTPServer:
    """Serves an ASGI application in a thread.

    Args:
        bound: the socket to listen on.
        on_failure: called with the reason when the thread ends by itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        options: ServeOptions,
        on_failure: Callable[[BaseException], object],
    ) -> None:
        config = uvicorn.Config(
            app,
            http=connection_type(options),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=options.max_header_bytes,
        )
        self._server, self._bound, self._on_failure = uvicorn.Server(config), bound, on_failure
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Take no more connections, let the answers that are complete be sent, and end the thread."""
        self._server.should_exit = True
        self._thread.join(timeout_s)

    def _run(self) -> None:
        reason = "nobody asked it to"
        try:
            asyncio.run(self._serve())
            if self._server.should_exit:
                return
        except BaseException as error:  # uvicorn may raise SystemExit
            reason = f"{type(error).__name__}: {first_line(error)}"
        self._on_failure(OSError(f"the HTTP server has ended: {reason}"))

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_tell)
        await self._server.serve(sockets=[self._bound])


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print an error that nobody has caught, in one line."""
    error = context.get("exception")
    about = "" if error is None else f": {type(error).__name__}: {first_line(error)}"
    print(f"{context.get('message', 'error')}{about}", file=sys.stderr)
