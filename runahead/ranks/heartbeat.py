"""Heartbeats through the rendezvous store, by which a rank tells whether a peer is working, alive or silent.

Every rank's heartbeat thread publishes two counters:

- beat increases when the main thread made progress (it reported a layer or a token, or used the processor), and also
  while it waits for a peer or is known to be busy. The beat of a rank that sleeps in a call, is stopped or died stands
  still. So neither a long layer nor a long decode counts as silence, and of several ranks that wait for each other only
  the one that caused it is silent.
- work increases likewise, but not while the rank waits. If all ranks wait and no work increases, what they wait for
  will not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from runahead.failures import first_line
from runahead.ranks.meeting.local_store import FolderFailure
from runahead.ranks.meeting.presence import Presence
from runahead.ranks.mesh import ALONE
from runahead.ranks.worker import Worker

PERIOD_S = 0.25
"""Seconds between two beats."""

ANNOUNCE_S = 1.5
"""Seconds that a failing rank spends at most on announcing it: a store whose host is stalled blocks its callers."""

CLOSE_S = 60.0
"""Most seconds that closing waits for the thread: a request may take seconds on a busy machine, and a thread that comes
back from the store while the interpreter ends aborts the process."""

FAILURE = "failure"


class Heartbeat:
    """This rank's counters and its view of the other ranks'.

    Args:
        store: of torch.distributed. It is cloned into connections of the heartbeat's own, since a blocking call blocks
            its connection.
        computing: `threading.get_ident` of the thread whose use of the processor counts as progress. None on a GPU,
            where a call that waits for the device also uses the processor.
        name: of a rank in messages.

    Attributes:
        seen: last beat seen of every rank, updated while this rank waits or looks.
        seen_work: last work counter seen of every rank.
        failure: the first failure that a rank announced or that was detected (a process that is gone); None so far.
        is_end: the failure is a process that ended without announcing one, as processes do after a job without errors.
        asking_since: `time.monotonic` of the store request that is not answered yet, or None.
        times_asked: store requests so far.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        computing: int | None,
        name: Callable[[int], str] = ALONE.name,
    ) -> None:
        self._beats, self._announcements = (dist.PrefixStore("runahead", store.clone()) for _ in range(2))
        self._rank, self._name = rank, name
        self._beside: list[Presence] = []
        self._computing = [] if computing is None else [computing]
        self._counts_processor_time = computing is not None
        self._worked_s = 0.0
        self._progress, self._published = 0, -1
        self._beat, self._work = 0, 0
        self._lock = threading.Lock()  # for these four, since two threads may wait at once
        self._busy, self._masked, self._waiting, self._looking = 0, 0, 0, 0
        self.seen, self.seen_work = [-1] * size, [-1] * size
        self.failure: str | None = None
        self.is_end = False
        self.asking_since: float | None = None
        self.times_asked = 0
        self._closed = threading.Event()
        self._beats.set(str(rank), "0 0")
        # Started now, since a rank that runs out of memory cannot start a thread.
        self._announcer = Worker("announcements")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, ranks: Sequence[Presence]) -> None:
        """Start the thread, once every rank has made its heartbeat.

        Args:
            ranks: the processes of all ranks, as `meet` returns them.
        """
        self._beside = [each for each in ranks if each.rank != self._rank and each.is_beside(ranks[self._rank])]
        self._thread.start()

    def progress(self) -> None:
        """Count progress of the main thread."""
        self._progress += 1

    def also_computes(self, thread: int) -> None:
        """Count the processor time of another thread as progress; `thread` is its `threading.get_ident`."""
        if self._counts_processor_time:
            self._computing.append(thread)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context manager in which this rank counts as working."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
            self.progress()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager in which this rank counts as alive and reads the other ranks' counters.

        It does not count as working, except in a `busy` inside.
        """
        with self._lock:
            before, self._masked = self._masked, self._busy
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                self._masked = before
            self.progress()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Context manager in which this rank reads the other ranks' counters, whatever it does."""
        with self._lock:
            self._looking += 1
        try:
            yield
        finally:
            with self._lock:
                self._looking -= 1

    def announce_failure(self, message: str) -> None:
        """Announce a failure to all ranks, so that none waits for this one. Only the first announcement is kept."""

        def announce() -> None:
            with suppress(RuntimeError):  # the store is gone, and the ranks with it; or it can take no word more
                self._announcements.compare_set(FAILURE, "", message)

        since = self.asking_since
        is_cut_off = since is not None and time.monotonic() - since > ANNOUNCE_S
        self._announcer.submit(announce).done.wait(timeout=PERIOD_S if is_cut_off else ANNOUNCE_S)

    def announced(self) -> str | None:
        """Ask the store for the first announced failure; None also if the store does not answer within a period."""

        def ask() -> str | None:
            return self._announcements.get(FAILURE).decode() if self._announcements.check([FAILURE]) else None

        job = self._announcer.submit(ask)
        return job.result if job.done.wait(timeout=PERIOD_S) else None

    def find_ended(self) -> str | None:
        """Describe a rank of this machine whose process has ended; None if all still run."""
        for each in self._beside:
            if each.has_ended:
                return f"{self._name(each.rank)} has ended without an error message (process {each.pid} on {each.host})"
        return None

    def close(self) -> None:
        self._closed.set()
        self._announcer.close()
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            ended = self.find_ended()
            try:
                self.times_asked += 1
                self.asking_since = time.monotonic()
                self._publish()
                self._look()
                self.asking_since = None
            except RuntimeError as error:
                if isinstance(error, FolderFailure):
                    lost = f"{self._name(self._rank)} cannot reach the others ({first_line(error)})"
                else:
                    lost = f"the rendezvous store is lost, its launcher or host is gone ({first_line(error)})"
                self._has_ended(ended or lost)
                return
            self._has_ended(ended)  # after _look: what the process announced before it ended says more

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
        """Whether the threads that compute used the processor since the last call."""
        before, self._worked_s = self._worked_s, sum(map(_processor_s, self._computing))
        return self._worked_s - before > PERIOD_S / 100

    def _look(self) -> None:
        if self._waiting or self._looking:
            for rank in range(len(self.seen)):
                beat, work = self._beats.get(str(rank)).split()
                self.seen[rank], self.seen_work[rank] = int(beat), int(work)
        if self.failure is None and self._beats.check([FAILURE]):
            self.failure = self._beats.get(FAILURE).decode()


def _processor_s(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
