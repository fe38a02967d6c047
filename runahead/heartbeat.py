"""Heartbeats through the rendezvous store: is a peer alive, working, or silent?

Every rank's heartbeat thread publishes a counter. It moves when the main thread reported progress (a layer, a token)
and, while that thread waits or is known to be busy (loading), by itself. A rank that hangs, is stopped or died stops
counting. So a long decode is not silence, and of several ranks that wait for each other only the true cause is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

PERIOD_S = 0.25


class Heartbeat:
    """This rank's beat and its view of the others'."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._progress = 0
        self._steady = 0
        self._published = -1
        self._beat = 0
        now = time.monotonic()
        self._last_seen = [(-1, now) for _ in range(size)]  # per rank: its counter, when it last moved
        self._watched: frozenset[int] = frozenset()
        self.failure: str | None = None
        """The first failure that some rank announced."""
        self._lost_store: str | None = None
        self._closed = threading.Event()
        self._store.set(self._key(rank), "0")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Call once every rank has made its heartbeat."""
        self._thread.start()

    def progress(self) -> None:
        """The main thread got somewhere."""
        self._progress += 1

    @contextmanager
    def steady(self, watched: frozenset[int] = frozenset()) -> Iterator[None]:
        """While it is open this rank counts as alive without progress; it watches the ranks given."""
        before, self._watched = self._watched, watched
        self._steady += 1
        for rank in watched:
            self._last_seen[rank] = (self._last_seen[rank][0], time.monotonic())
        try:
            yield
        finally:
            self._steady -= 1
            self._watched = before
            self.progress()

    def silence_s(self, rank: int) -> float:
        """Seconds since the beat of a watched rank last moved."""
        return time.monotonic() - self._last_seen[rank][1]

    def announce_failure(self, message: str) -> None:
        """Tell every rank, so that none waits for one that will not come."""
        with suppress(RuntimeError):  # the store is gone, and the ranks with it
            self._store.set("runahead/failure", message)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD_S)

    @staticmethod
    def _key(rank: int) -> str:
        return f"runahead/beat/{rank}"

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._publish()
                self._look()
            except RuntimeError as error:  # the store's host is gone
                self.failure = self.failure or f"the rendezvous store is lost ({str(error).splitlines()[0]})"
                return

    def _publish(self) -> None:
        if self._steady or self._progress != self._published:
            self._published = self._progress
            self._beat += 1
            self._store.set(self._key(self._rank), str(self._beat))

    def _look(self) -> None:
        for rank in self._watched:
            beat = int(self._store.get(self._key(rank)))
            if beat != self._last_seen[rank][0]:
                self._last_seen[rank] = (beat, time.monotonic())
        if self.failure is None and self._store.check(["runahead/failure"]):
            self.failure = self._store.get("runahead/failure").decode()
