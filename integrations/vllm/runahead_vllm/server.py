"""Runahead's server: what it has loaded, and prompts that it is asked to compute."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/prefill"
CONNECT_S = 5.0
MOST_ANSWER_BYTES = 4 << 20


class ServerError(ValueError):
    """The server did not answer as wanted, in words."""


class Unavailable(ServerError):
    """It may answer later."""


@dataclass
class Call:
    """A question that can be ended from another thread: closing the connection has the server cancel it."""

    _socket: socket.socket | None = None
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, connected: socket.socket) -> None:
        """Raises: ServerError: it was cancelled before."""
        with self._lock:
            if self._cancelled:
                raise ServerError("cancelled")
            self._socket = connected  # a connection forgets its own once it has read "Connection: close"

    def end(self) -> None:
        """Forget the socket, which is about to be closed."""
        with self._lock:
            self._socket = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with suppress(OSError):  # it has ended by itself
                    self._socket.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Server:
    """Its address, and the key that it asks for (or an empty text)."""

    url: str
    api_key: str = field(default="", repr=False)

    def about(self, wait_s: float, pause_s: float = 0.5) -> dict[str, Any]:
        """Ask what it has loaded. A server that is still starting is asked again.

        Raises: ServerError: it is not there in time, or hands over no prompts.
        """
        end = time.monotonic() + wait_s
        while True:
            left_s = max(end - time.monotonic(), 0.1)
            try:
                return self._ask("GET", None, min(left_s, CONNECT_S), Call())
            except Unavailable as error:
                if time.monotonic() + pause_s > end:
                    raise ServerError(f"{self.url} does not answer within {wait_s:g} s: {error}") from error
            time.sleep(pause_s)

    def prefill(self, ids: list[int], wait_s: float, call: Call) -> dict[str, Any]:
        """Have a prompt computed: the answer, which names its file.

        Raises: ServerError: it cannot or will not, or not in time, or the call was cancelled.
        """
        return self._ask("POST", {"prompt": ids}, wait_s, call)

    def _ask(self, method: str, body: object, wait_s: float, call: Call) -> dict[str, Any]:
        url = urlsplit(self.url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        end = time.monotonic() + wait_s
        assert url.hostname is not None, url
        connection = kind(url.hostname, url.port, timeout=min(wait_s, CONNECT_S))
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.connect()
            call.begin(connection.sock)
            connection.sock.settimeout(max(end - time.monotonic(), 0.01))
            text = None if body is None else json.dumps(body)
            connection.request(method, url.path.rstrip("/") + PATH, text, headers)
            response = connection.getresponse()
            answer = response.read(MOST_ANSWER_BYTES)
        except TimeoutError as error:
            raise Unavailable(f"no answer within {wait_s:.1f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        finally:
            call.end()
            connection.close()
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = None
        if response.status != 200:
            words = _message(found)
            kind_of_error = Unavailable if response.status in (429, 503) else ServerError
            raise kind_of_error(f"it answered {response.status}{words and ': ' + words}")
        if not isinstance(found, dict):
            raise ServerError("its answer is no JSON object")
        return found


def _message(answer: object) -> str:
    """The words of an error, in one line."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return " ".join(str(message).split())[:300] if message else ""
