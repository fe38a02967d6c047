"""The server's log: a line on standard error per request that has ended."""

from __future__ import annotations

import sys
import time
from typing import Any

from starlette.requests import Request as HTTPRequest

from launch.program.ending import say
from launch.server.errors import shown
from launch.server.options import ServeOptions
from launch.server.request.fields import ChatRequest, CompletionRequest

MOST_NAMES = 100
"""Unknown fields that are told: a client may make up any number."""


class RequestLog:
    """The log of one server.

    Args:
        options: whether there is a log, and whether it has the prompts.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._ignored = set[str]()

    def ignored(self, name: str) -> None:
        """Print once that a field of this name is unknown."""
        if name in self._ignored or len(self._ignored) == MOST_NAMES:
            return
        self._ignored.add(name)
        say(f"the field '{shown(name)}' is unknown and ignored; serve.unknown_fields=refuse refuses such requests")
        if len(self._ignored) == MOST_NAMES:
            say(f"after {MOST_NAMES} unknown fields no more are told")

    def ended(self, request: HTTPRequest, what: str, began_s: float) -> None:
        """Print a line about a request that has ended."""
        if self._options.log and request.url.path.startswith("/v1/"):
            client = request.client.host if request.client else "-"
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            seconds = time.monotonic() - began_s
            path = shown(request.url.path)
            print(f"{now} {request.state.identity} {client} {path} {seconds:.2f} s: {what}", file=sys.stderr)

    def prompt(self, read: ChatRequest | CompletionRequest) -> str:
        """A prompt's text for the log, if that is asked for."""
        if not self._options.log_prompts:
            return ""
        text: Any = read.messages if isinstance(read, ChatRequest) else read.prompts
        if read.prompt_cache is not None:
            text = [read.prompt_cache.prompt, text]
        return f", prompt {shown(str(text), 10_000)}"
