"""The peers that are loaded at once, as many as memory allows; the one that was not asked for longest makes way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import psutil

from launch.program.ending import say

ROOM_BYTES = 4 * 2**30
"""Memory that is free before another peer is loaded: more than any of them takes, with the longest prompt."""


class Answers(Protocol):
    """Processes of a peer, as `LineProcesses`."""

    ready: Any

    def ask(self, request: dict[str, Any]) -> Any: ...

    def kill(self) -> None: ...


def free_bytes() -> int:
    """Memory of this host that is free."""
    return int(psutil.virtual_memory().available)


class Loaded:
    """Peers that answer, loaded when they are first asked.

    Args:
        openers: by name, makes a peer's processes. Raises ValueError or OSError where it cannot.
        warmup: prompts of each length that do not count.
        rest_s: seconds before each prompt, in which threads of the peer before stop spinning.
        free: memory that is free, in bytes.
    """

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Answers]],
        *,
        warmup: int,
        rest_s: float,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self._openers, self._warmup, self._rest_s, self._free = openers, warmup, rest_s, free
        self._open = dict[str, Answers]()  # the one that was asked last is the last one
        self._warm = set[tuple[str, int]]()

    def ask(self, name: str, ids: list[int], num_new: int) -> dict[str, Any]:
        """Times and tokens of a peer, with its version, once it has answered other prompts of the same length.

        Raises:
            ValueError, OSError: it cannot be loaded, has ended, or answered with another number of tokens.
        """
        peer = self._opened(name)
        if (name, len(ids)) not in self._warm:
            for number in range(1, self._warmup + 1):  # prompts that begin otherwise, as peers keep what they have read
                peer.ask({"ids": ids[number:] + ids[:number], "new": num_new})
            self._warm.add((name, len(ids)))
        time.sleep(self._rest_s)
        answer: dict[str, Any] = peer.ask({"ids": ids, "new": num_new})
        if len(answer["tokens"]) != num_new:
            raise ValueError(f"{name} answered with {len(answer['tokens'])} tokens in place of {num_new}")
        return answer | peer.ready

    def _opened(self, name: str) -> Answers:
        if (peer := self._open.pop(name, None)) is None:
            while self._open and self._free() < ROOM_BYTES:
                self.close(next(iter(self._open)))
            say(f"loading {name}")
            peer = self._openers[name]()
        self._open[name] = peer
        return peer

    def close(self, name: str) -> None:
        """End a peer's processes, if it has any."""
        if (peer := self._open.pop(name, None)) is not None:
            peer.kill()
        self._warm = {each for each in self._warm if each[0] != name}

    def close_all(self) -> None:
        """End all processes."""
        for name in list(self._open):
            self.close(name)
