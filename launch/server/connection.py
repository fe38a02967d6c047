"""Connections of the HTTP server: uvicorn's, with limits on their number, their headers and how long they may take."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from launch.server.errors import APIError, dumps
from launch.server.options import ServeOptions

KEPT = 2
"""Connections beside `serve.max_connections`, each for one request of those who watch the server."""
WATCHING = (b"/health", b"/ready", b"/metrics")


def connection_type(options: ServeOptions) -> type[H11Protocol]:
    """The class of the connections of one server, of which uvicorn makes each."""
    return type("ServerConnection", (Connection,), {"options": options, "kept": list[Connection]()})


class Connection(H11Protocol):
    """One connection. It is closed if a request's header does not arrive in time, or its client reads nothing.

    Where `serve.max_connections` are open a few more are kept, each for one request of those who watch the server.
    As these ask at once, the newest of them takes the place of one that has asked for nothing.

    Attributes:
        options: limits of the server.
        kept: its connections beside `serve.max_connections`.
    """

    options: ServeOptions
    kept: list[Connection]
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.conn: BoundedConnection = BoundedConnection(self.options.max_header_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) - len(self.kept) > self.options.max_connections and not self._keep():
            self._refuse(_too_many())
        else:
            self._await_header()

    def _keep(self) -> bool:
        """Let this be one of the kept connections. Returns whether it is."""
        silent = [each for each in self.kept if each.cycle is None]
        if len(self.kept) == KEPT and silent:
            self.kept.remove(silent[0])
            silent[0]._refuse(_too_many())
        self.conn.is_kept = len(self.kept) < KEPT
        if self.conn.is_kept:
            self.kept.append(self)
        return self.conn.is_kept

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_idle and self._header_timer is None:
            self._await_header()
        super().data_received(data)
        if self.conn.is_kept and self.cycle is not None:
            self.cycle.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        if not self._is_idle:
            self._end_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._end_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_reader_of_rest()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader_of_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._end_write_timer()
        if self in self.kept:
            self.kept.remove(self)
        self._unset_keepalive_if_required()  # uvicorn does not after a reset, and its timer holds the request
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(self.options.read_timeout_s, self.transport.abort)

    def _end_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _await_reader(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.options.write_timeout_s, self.transport.abort)

    def _await_reader_of_rest(self) -> None:
        """Bound the time in which a closing connection waits for its client to read what is left."""
        if self.transport.is_closing():
            self._await_reader()

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, error: APIError) -> None:
        body = dumps(error.body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            start = self.conn.send(h11.Response(status_code=error.status, headers=headers))
        except h11.LocalProtocolError:  # in the middle of an answer
            self.transport.abort()
            return
        self.transport.write((start or b"") + body)
        self.transport.close()
        self._await_reader_of_rest()


class BoundedConnection(h11.Connection):
    """h11's parser, whose limit also holds for a header that arrives at once.

    Attributes:
        is_kept: for those who watch the server, and for nobody else.
        refusal: why a request was refused; uvicorn tells nobody what was raised.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes, self.is_kept = max_header_bytes, False
        self.refusal = _unreadable("it is not HTTP")

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:  # of one that arrives in parts
                self.refusal = _unreadable("its header is too large")
            raise
        if isinstance(event, h11.Request):
            if _header_bytes(event) > self._max_header_bytes:
                self.refusal = _unreadable("its header is too large")
            elif {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # RFC 9112, 6.3: what stands between may have read another end of the body.
                self.refusal = _unreadable("it has both Content-Length and Transfer-Encoding")
            elif self.is_kept and event.target.partition(b"?")[0] not in WATCHING:
                self.refusal = _too_many()
            else:
                return event
            raise h11.RemoteProtocolError(str(self.refusal))
        return event


def _unreadable(reason: str) -> APIError:
    return APIError(400, f"this request cannot be read: {reason}")


def _too_many() -> APIError:
    return APIError(503, "too many connections are open; try again later")


def _header_bytes(request: h11.Request) -> int:
    lines = sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    return len(request.method) + len(request.target) + lines
