"""Decides that a peer will not come: a thread that looks on while the main thread waits.

A thread, since a main thread that is stuck in a call of a library can decide nothing. Nor can the groups' own timeouts:
a Gloo group that timed out is unusable, and neither its nor NCCL's timeout knows of a peer that is alive and busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from runahead.failures import PeerFailure
from runahead.ranks.heartbeat import Heartbeat

PERIOD_S = 0.1
LONGEST_STEP_S = 0.5
"""A job that was suspended and goes on has not been silent: a longer gap counts for this."""

STANDSTILL_S = 1.0
"""A standstill is called one by so much later than a peer silent: who waits for the silent one says so first."""

GRACE_S = 3.0
"""Seconds in which the main thread may end by itself once there is no point in going on."""


class Wait:
    """What the main thread waits for.

    Attributes:
        peers: who can hold it up.
        verdict: why it is in vain, once that is known.
        silent: the peers that were found silent then.
    """

    def __init__(
        self, what: str, rank: int, peers: Iterable[int], detail: Callable[[], str] | None, timeout_s: float
    ) -> None:
        self.what, self.peers = what, sorted(set(peers) - {rank})
        self._rank, self._detail, self._timeout_s = rank, detail, timeout_s
        self.began_s = time.monotonic()
        self.verdict: str | None = None
        self.silent: list[int] = []
        self._silence_s: dict[int, float] = {}
        self._beats: list[int] = []
        self._standstill_s, self._work = 0.0, list[int]()
        self._times_asked, self._asked_s = 0, 0.0

    def describe(self) -> str:
        """What is waited for, with what is known of it."""
        return self.what if self._detail is None else f"{self.what} ({self._detail()})"

    def look(self, heartbeat: Heartbeat, elapsed_s: float) -> None:
        """Take note of who moved; sets the verdict if nobody did for too long.

        An answer of the store is as old as its question: over a link that hardly carries anything, what arrives now is
        no sign that anybody is there now.
        """
        beats, work = list(heartbeat.seen), list(heartbeat.seen_work)
        if heartbeat.times_asked != self._times_asked:
            self._times_asked, self._asked_s = heartbeat.times_asked, 0.0
        elif heartbeat.asking_since is not None:
            self._asked_s += elapsed_s
        for rank, (before, beat) in enumerate(zip(self._beats or beats, beats, strict=True)):
            self._silence_s[rank] = self._silence_s.get(rank, 0.0) + elapsed_s if beat == before else self._asked_s
        self._standstill_s = self._standstill_s + elapsed_s if work == self._work else self._asked_s
        self._beats, self._work = beats, work
        self.silent = self._silent_for(self._timeout_s, self.peers)
        if self.peers and self._standstill_s > self._timeout_s + STANDSTILL_S:
            others = [rank for rank in range(len(beats)) if rank != self._rank]
            self.silent = self.silent or self._silent_for(self._timeout_s, others)
            self.verdict = (
                f"no rank got anywhere for {self._standstill_s:.0f} s though all are alive; {self._waited()}; "
                f"the link may be cut or too slow for ranks.timeout_s={self._timeout_s:g}"
            )
        if self.silent:
            self.verdict = self._silence(heartbeat)

    def _silent_for(self, seconds: float, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._silence_s[rank] > seconds]

    def _silence(self, heartbeat: Heartbeat) -> str:
        silence_s = max(self._silence_s[peer] for peer in self.silent)
        asking_since = heartbeat.asking_since
        cut_off = asking_since is not None and time.monotonic() - asking_since > self._timeout_s / 2
        who = (
            f"rank {' and rank '.join(map(str, self.silent))} {'has' if len(self.silent) == 1 else 'have'} been silent"
        )
        hint = " and the rendezvous store does not answer either, so the network may be cut" if cut_off else ""
        return f"{who} for {silence_s:.0f} s{hint}; {self._waited()} (ranks.timeout_s={self._timeout_s:g})"

    def _waited(self) -> str:
        return f"waited {time.monotonic() - self.began_s:.0f} s for {self.describe()}"


class Watcher:
    """Looks on while the main thread works with others, and tells it when there is no point in going on.

    Attributes:
        is_told: the main thread knows that it has to end.
        when_stuck: called, in this thread, if the main thread was told and did not end within `GRACE_S`: it is in a
            call that never returns, or that takes long. None: it is left alone.
    """

    def __init__(self, heartbeat: Heartbeat, rank: int, timeout_s: float) -> None:
        self.when_stuck: Callable[[PeerFailure], object] | None = None
        self._heartbeat, self._rank, self._timeout_s = heartbeat, rank, timeout_s
        self._wait: Wait | None = None
        self.last_failed: Wait | None = None
        self._engaged = 0
        self.is_told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def current(self) -> Wait | None:
        """What is waited for now, or was in vain."""
        return self._wait or self.last_failed

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """While it is open this rank depends on the others: it must end if they do."""
        self._engaged += 1
        try:
            yield
        finally:
            self._engaged -= 1

    @contextmanager
    def waiting(self, what: str, peers: Iterable[int], detail: Callable[[], str] | None = None) -> Iterator[Wait]:
        """While it is open the main thread waits for others. One wait at a time."""
        wait = Wait(what, self._rank, peers, detail, self._timeout_s)
        with self.engaged(), self._heartbeat.waiting():
            self._wait = wait
            try:
                yield wait
            except BaseException:
                self.last_failed = wait
                raise
            finally:
                self._wait = None

    def failure(self, wait: Wait | None = None) -> PeerFailure | None:
        """Why there is no point in going on, if so. The caller sets `is_told` and raises it."""
        verdict = self._reason(wait)
        return None if verdict is None else PeerFailure(verdict)

    def _reason(self, wait: Wait | None) -> str | None:
        if self._heartbeat.failure is None:
            return None if wait is None else wait.verdict
        return self._heartbeat.failure + ("" if wait is None else f" (while waiting for {wait.describe()})")

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD_S)

    def _looked_at(self, elapsed_s: float) -> str | None:
        """Why there is no point in going on, if the main thread does not know yet.

        Nothing of the wait outlives this call: what it tells of, and the K,V with it, would not be freed.
        """
        wait = self._wait
        if wait is not None and wait.verdict is None:
            wait.look(self._heartbeat, elapsed_s)
        return self._reason(wait) if self._engaged and not self.is_told else None

    def _run(self) -> None:
        last, in_vain_s = time.monotonic(), 0.0
        while not self._closed.wait(PERIOD_S):
            now = time.monotonic()
            elapsed_s, last = min(now - last, LONGEST_STEP_S), now
            reason = self._looked_at(elapsed_s)
            in_vain_s = 0.0 if reason is None else in_vain_s + elapsed_s
            if reason is not None and in_vain_s > GRACE_S and self.when_stuck is not None:
                self.when_stuck(PeerFailure(reason))
                return
