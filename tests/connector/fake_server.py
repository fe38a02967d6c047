"""A server of POST and GET /v1/prefill for tests, with what can go wrong."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status and JSON, or bytes as they are; status 0: the connection is closed without a word."""


@dataclass
class FakeServer:
    """The answers that it gives, and the questions that it was asked.

    Attributes:
        prefill: the answer to a prompt; it may wait for `closed`, which says whether the client has gone.
    """

    about: Any
    prefill: Callable[[list[int], Callable[[float], bool]], Answer]
    api_key: str = ""
    asked: list[list[int]] = field(default_factory=list)
    cancelled: list[list[int]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(server: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """Serve on a port of this machine until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(server.about if isinstance(server.about, tuple) else (200, server.about))

        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            if server.api_key and self.headers.get("Authorization") != f"Bearer {server.api_key}":
                self._answer((401, {"error": {"message": "no such key"}}))
                return
            server.asked.append(ids)

            def closed(seconds: float) -> bool:
                gone = bool(select.select([self.connection], [], [], seconds)[0])
                if gone and ids not in server.cancelled:
                    server.cancelled.append(ids)
                return gone

            self._answer(server.prefill(ids, closed))

        def _answer(self, answer: Answer) -> None:
            status, body = answer
            if status == 0:
                self.close_connection = True
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
