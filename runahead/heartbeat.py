"""Heartbeats through the rendezvous store: is a peer alive, working, or silent?

Every rank's heartbeat thread publishes a counter. It moves when the main thread got somewhere: it reported a layer or
a token, or used the processor; and, while that thread waits for a peer or is known to be busy, by itself. A rank that
sleeps in a call, is stopped or died stops counting. So neither a long layer nor a long decode is silence, and of
several ranks that wait for each other only the true cause is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

PERIOD_S = 0.25
ANNOUNCE_S = 1.5
"""A store whose host is stalled blocks its callers; a rank that fails does not wait longer than this to say so."""

FAILURE = "failure"


class Heartbeat:
    """This rank's beat and its view of the others'.

    Args:
        store: of torch.distributed; connections of its own are made from it, since a call that blocks on one blocks
            that connection.
        counts_processor_time: a main thread that computes counts as progress. Right for CPUs; on a GPU a call that
            waits for the device for ever spins.
    """

    def __init__(self, store: Any, rank: int, size: int, *, counts_processor_time: bool) -> None:
        self._beats, self._announcements = (dist.PrefixStore("runahead", store.clone()) for _ in range(2))
        self._rank = rank
        self._main = threading.get_ident() if counts_processor_time else None
        self._worked_s = 0.0
        self._progress, self._published, self._beat = 0, -1, 0
        self._steady = 0
        self._watched: frozenset[int] = frozenset()
        self.seen = [-1] * size
        """Last counter seen of every rank that was watched."""
        self.failure: str | None = None
        """The first failure that some rank announced."""
        self._closed = threading.Event()
        self._beats.set(str(rank), "0")
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
        try:
            yield
        finally:
            self._steady -= 1
            self._watched = before
            self.progress()

    def announce_failure(self, message: str) -> None:
        """Tell every rank, so that none waits for one that will not come. The first announcement stands."""

        def announce() -> None:
            with suppress(RuntimeError):  # the store is gone, and the ranks with it
                self._announcements.compare_set(FAILURE, "", message)

        thread = threading.Thread(target=announce, name="announcement", daemon=True)
        thread.start()
        thread.join(timeout=ANNOUNCE_S)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD_S)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            try:
                self._publish()
                self._look()
            except RuntimeError as error:  # the store's host is gone
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.failure = self.failure or f"the rendezvous store is lost ({reason})"
                return

    def _publish(self) -> None:
        if self._steady or self._progress != self._published or self._has_worked():
            self._published = self._progress
            self._beat += 1
            self._beats.set(str(self._rank), str(self._beat))

    def _has_worked(self) -> bool:
        """Has the main thread used the processor since it was last asked?"""
        if self._main is None:
            return False
        before, self._worked_s = self._worked_s, time.clock_gettime(time.pthread_getcpuclockid(self._main))
        return self._worked_s - before > PERIOD_S / 100

    def _look(self) -> None:
        for rank in self._watched:
            self.seen[rank] = int(self._beats.get(str(rank)))
        if self.failure is None and self._beats.check([FAILURE]):
            self.failure = self._beats.get(FAILURE).decode()
