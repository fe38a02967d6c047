"""The server's log: a line on standard error per request that has ended."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

from starlette.requests import Request as HTTPRequest

from launch.program.ending import say
from launch.server.errors import shown
from launch.server.options import ServeOptions
from launch.server.request.fields import ChatRequest, CompletionRequest

MOST_NAMES = 100
"""Unknown fields that are told: a client may make up any number."""
MOST_REFUSED = 20
"""Lines in a minute about requests without a key or for nothing: whoever reaches the port can send any number."""
MINUTE_S = 60.0


class RequestLog:
    """The log of one server.

    Args:
        options: whether there is a log, and whether it has the prompts.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._ignored, self._one_at_a_time = set[str](), threading.Lock()
        self._minute_s, self._num_refused = -math.inf, 0

    def ignored(self, name: str) -> None:
        """Print once that a field of this name is unknown."""
        with self._one_at_a_time:  # several threads read bodies
            if name in self._ignored or len(self._ignored) >= MOST_NAMES:
                return
            self._ignored.add(name)
            number = len(self._ignored)
        say(f"the field '{shown(name)}' is unknown and ignored; serve.unknown_fields=refuse refuses such requests")
        if number == MOST_NAMES:
            say(f"after {MOST_NAMES} unknown fields no more are told")

    def ended(self, request: HTTPRequest, what: str, began_s: float) -> None:
        """Print a line about a request that has ended."""
        if self._options.log and request.url.path.startswith("/v1/"):
            self._tell(request, f"{request.state.key.name} {shown(request.url.path)}".lstrip(), what, began_s)

    def refused(self, request: HTTPRequest, what: str, began_s: float) -> None:
        """Print a line about a request of somebody who may know nothing of this server, if there were not many."""
        if not self._options.log:
            return
        if began_s - self._minute_s >= MINUTE_S:
            self._minute_s, self._num_refused = began_s, 0
        self._num_refused += 1
        if self._num_refused <= MOST_REFUSED:
            self._tell(request, f"{shown(request.method)} {shown(request.url.path)}", what, began_s)
        if self._num_refused == MOST_REFUSED:
            say(f"after {MOST_REFUSED} refused requests in a minute no more are told; /metrics counts them")

    def _tell(self, request: HTTPRequest, asked: str, what: str, began_s: float) -> None:
        client = request.client.host if request.client else "-"
        now, seconds = time.strftime("%Y-%m-%dT%H:%M:%S"), time.monotonic() - began_s
        print(f"{now} {request.state.identity} {client} {asked} {seconds:.2f} s: {what}", file=sys.stderr)

    def prompt(self, read: ChatRequest | CompletionRequest) -> str:
        """A prompt's text for the log, if that is asked for."""
        if not self._options.log_prompts:
            return ""
        text: Any = read.messages if isinstance(read, ChatRequest) else read.prompts
        if read.prompt_cache is not None:
            text = [read.prompt_cache.prompt, text]
        return f", prompt {shown(str(text), 10_000)}"
