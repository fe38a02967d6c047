"""Heartbeats through the rendezvous store: is a peer alive, working, or silent?

Every rank's heartbeat thread publishes two counters. The first, its beat, moves when the main thread got somewhere (it
reported a layer or a token, or used the processor) and, while that thread waits for a peer or is known to be busy, by
itself. A rank that sleeps in a call, is stopped or died stops counting. So neither a long layer nor a long decode is
silence, and of several ranks that wait for each other only the true cause is silent. The second, its work, moves
likewise but not while it waits: where all ranks wait and nobody's work moves, what they wait for will not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from runahead.failures import first_line
from runahead.ranks.rendezvous import Presence
from runahead.ranks.worker import Worker

PERIOD_S = 0.25
ANNOUNCE_S = 1.5
"""A store whose host is stalled blocks its callers; a rank that fails does not wait longer than this to say so."""

FAILURE = "failure"


class Heartbeat:
    """This rank's beat and its view of the others'.

    Args:
        store: of torch.distributed; connections of its own are made from it, since a call that blocks on one blocks
            that connection.
        counts_processor_time: a thread that computes counts as progress. Right for CPUs; on a GPU a call that waits
            for the device for ever spins.
    """

    def __init__(self, store: Any, rank: int, size: int, *, counts_processor_time: bool) -> None:
        self._beats, self._announcements = (dist.PrefixStore("runahead", store.clone()) for _ in range(2))
        self._rank = rank
        self._beside: list[Presence] = []
        self._computing = [threading.get_ident()] if counts_processor_time else []
        self._counts_processor_time = counts_processor_time
        self._worked_s = 0.0
        self._progress, self._published = 0, -1
        self._beat, self._work = 0, 0
        self._busy, self._masked, self._waiting = 0, 0, 0
        self.seen = [-1] * size
        """Last beat seen of every rank, kept up to date while this one waits."""
        self.seen_work = [-1] * size
        """The same of their work."""
        self.failure: str | None = None
        """The first failure that some rank announced, or that shows by itself: a process that is gone."""
        self.is_end = False
        """The failure is an end without a word: it may be that of a job that went well."""
        self.asking_since: float | None = None
        """Since when (`time.monotonic`) the store owes an answer."""
        self.times_asked = 0
        self._closed = threading.Event()
        self._beats.set(str(rank), "0 0")
        self._announcer = Worker("announcements")  # made now: a rank that runs out of memory gets no new thread
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, ranks: Sequence[Presence]) -> None:
        """Call once every rank has made its heartbeat; `ranks` as they met."""
        self._beside = [each for each in ranks if each.rank != self._rank and each.is_beside(ranks[self._rank])]
        self._thread.start()

    def progress(self) -> None:
        """The main thread got somewhere."""
        self._progress += 1

    def also_computes(self, thread: int) -> None:
        """A thread works for the main one; `thread` as of `threading.get_ident`."""
        if self._counts_processor_time:
            self._computing.append(thread)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it is open this rank counts as working."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self.progress()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While it is open this rank counts as alive, and looks at the others' counters.

        It counts as working only if it gets busy inside.
        """
        before, self._masked = self._masked, self._busy
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self._masked = before
            self.progress()

    def announce_failure(self, message: str) -> None:
        """Tell every rank, so that none waits for one that will not come. The first announcement stands."""

        def announce() -> None:
            with suppress(RuntimeError):  # the store is gone, and the ranks with it
                self._announcements.compare_set(FAILURE, "", message)

        since = self.asking_since
        is_cut_off = since is not None and time.monotonic() - since > ANNOUNCE_S
        self._announcer.submit(announce).done.wait(timeout=PERIOD_S if is_cut_off else ANNOUNCE_S)

    def announced(self) -> str | None:
        """The first failure that was announced, asked for now; None also where the store does not answer at once."""

        def ask() -> str | None:
            return self._announcements.get(FAILURE).decode() if self._announcements.check([FAILURE]) else None

        job = self._announcer.submit(ask)
        return job.result if job.done.wait(timeout=PERIOD_S) else None

    def find_ended(self) -> str | None:
        """A rank of this machine whose process has ended, in a few words."""
        for each in self._beside:
            if each.has_ended:
                return f"rank {each.rank} has ended without a word (process {each.pid} on {each.host})"
        return None

    def close(self) -> None:
        self._closed.set()
        self._announcer.close()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD_S)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            ended = self.find_ended()
            try:
                self.times_asked += 1
                self.asking_since = time.monotonic()
                self._publish()
                self._look()
                self.asking_since = None
            except RuntimeError as error:  # its host is gone, or was cut off
                lost = f"the rendezvous store is lost, its launcher or host is gone ({first_line(error)})"
                self._has_ended(ended or lost)
                return
            self._has_ended(ended)  # behind looking: what it announced before its end says more

    def _has_ended(self, what: str | None) -> None:
        if self.failure is None and what is not None:
            self.is_end, self.failure = True, what

    def _publish(self) -> None:
        has_moved = self._progress != self._published or self._has_worked()
        is_working = self._busy > self._masked
        if has_moved or is_working or self._waiting:
            self._published = self._progress
            self._beat += 1
            self._work += has_moved or is_working
            self._beats.set(str(self._rank), f"{self._beat} {self._work}")

    def _has_worked(self) -> bool:
        """Have the threads that compute used the processor since it was last asked?"""
        before, self._worked_s = self._worked_s, sum(map(_processor_s, self._computing))
        return self._worked_s - before > PERIOD_S / 100

    def _look(self) -> None:
        if self._waiting:
            for rank in range(len(self.seen)):
                beat, work = self._beats.get(str(rank)).split()
                self.seen[rank], self.seen_work[rank] = int(beat), int(work)
        if self.failure is None and self._beats.check([FAILURE]):
            self.failure = self._beats.get(FAILURE).decode()


def _processor_s(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
