"""Watcher thread, which decides from heartbeats when a wait of the main thread has failed.

The main thread cannot decide this itself while it is in a library call. Nor can the process groups' own timeouts: a
Gloo group that timed out is unusable, and neither Gloo's nor NCCL's timeout knows of a peer that is alive and busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from runahead.failures import PeerFailure
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.mesh import ALONE

PERIOD_S = 0.1
"""Seconds between two looks at the heartbeats."""

LONGEST_STEP_S = 0.5
"""Seconds that a longer gap between two looks counts as: a job that was suspended and resumed was not silent."""

STANDSTILL_S = 1.0
"""Seconds after `timeout_s` until a standstill of all ranks is reported, so that a silent peer is reported first."""

GRACE_S = 3.0
"""Seconds in which the main thread may end by itself before `when_stuck` is called."""


class Wait:
    """One wait of a thread for other ranks.

    Attributes:
        what: what is waited for, for messages.
        peers: ranks that can delay it.
        verdict: why it has failed, or None so far.
        silent: the ranks found silent by then.
    """

    def __init__(
        self,
        what: str,
        rank: int,
        peers: Iterable[int],
        detail: Callable[[], str] | None,
        timeout_s: float,
        name: Callable[[int], str] = ALONE.name,
    ) -> None:
        self.what, self.peers = what, sorted(set(peers) - {rank})
        self._rank, self._detail, self._timeout_s, self._name = rank, detail, timeout_s, name
        self.began_s = time.monotonic()
        self.verdict: str | None = None
        self.silent: list[int] = []
        self._silence_s: dict[int, float] = {}
        self._beats: list[int] = []
        self._standstill_s, self._work = 0.0, list[int]()
        self._times_asked, self._asked_s = 0, 0.0

    def describe(self) -> str:
        """Description of the present wait, with details if there are any."""
        return self.what if self._detail is None else f"{self.what} ({self._detail()})"

    def look(self, heartbeat: Heartbeat, elapsed_s: float) -> None:
        """Compare the counters with those of the last look, and set the verdict if they stood still for too long.

        Args:
            elapsed_s: seconds since the last look. While the store has not answered, they are added to the age of its
                last answer: over a very slow link an answer that arrives now does not show that a peer is alive now.
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
                f"no rank made progress for {self._standstill_s:.0f} s though all are alive; {self._waited()}; "
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
        have = "has" if len(self.silent) == 1 else "have"
        who = f"{' and '.join(map(self._name, self.silent))} {have} been silent"
        hint = " and the rendezvous store does not answer either, so the network may be cut" if cut_off else ""
        return f"{who} for {silence_s:.0f} s{hint}; {self._waited()} (ranks.timeout_s={self._timeout_s:g})"

    def _waited(self) -> str:
        return f"waited {time.monotonic() - self.began_s:.0f} s for {self.describe()}"


class Watch(Wait):
    """A look at other ranks while this one need not wait for them."""

    def _waited(self) -> str:
        return f"{self.describe()} was awaited beside other work"


class Watcher:
    """Watches the heartbeats while the main thread works with other ranks, and decides when it has to end.

    Attributes:
        is_told: the main thread knows that it has to end.
        when_stuck: called in the watcher's thread if the main thread has to end and did not within `GRACE_S`, as it is
            in a call that takes long or never returns. None: nothing is called.
        last_failed: the last wait that raised an error.

    Args:
        name: of a rank in messages.
    """

    def __init__(
        self, heartbeat: Heartbeat, rank: int, timeout_s: float, name: Callable[[int], str] = ALONE.name
    ) -> None:
        self.when_stuck: Callable[[PeerFailure], object] | None = None
        self._heartbeat, self._rank, self._timeout_s, self._name = heartbeat, rank, timeout_s, name
        self._lock = threading.Lock()
        self._waits: list[Wait] = []  # under way, the oldest first
        self._watches: list[Watch] = []
        self.last_failed: Wait | None = None
        self._engaged = 0
        self.is_told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def current(self) -> Wait | None:
        """The wait that is under way, the innermost of several, else the last one that failed."""
        return next(reversed(self._waits), self.last_failed)

    @property
    def num_waits(self) -> int:
        """Number of waits that are under way, in all threads."""
        return len(self._waits)

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Context manager in which this rank depends on the others and must end if they do."""
        with self._lock:
            self._engaged += 1
        try:
            yield
        finally:
            with self._lock:
                self._engaged -= 1

    @contextmanager
    def waiting(self, what: str, peers: Iterable[int], detail: Callable[[], str] | None = None) -> Iterator[Wait]:
        """Context manager in which this thread waits for other ranks.

        Two threads may wait at once: the main thread for a call that it gave to another one, and that one for a peer.
        """
        wait = Wait(what, self._rank, peers, detail, self._timeout_s, self._name)
        with self.engaged(), self._heartbeat.waiting():
            with self._lock:
                self._waits.append(wait)
            try:
                yield wait
            except BaseException:
                self.last_failed = wait
                raise
            finally:
                with self._lock:
                    self._waits.remove(wait)

    @contextmanager
    def watching(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Context manager in which this rank also has to end if a peer falls silent while it does not wait for it.

        Several waits in a row would each begin to count a peer's silence anew.
        """
        watch = Watch(what, self._rank, peers, None, self._timeout_s, self._name)
        with self._heartbeat.looking():
            with self._lock:
                self._watches.append(watch)
            try:
                yield
            except BaseException:
                if watch.verdict is not None:
                    self.last_failed = watch
                raise
            finally:
                with self._lock:
                    self._watches.remove(watch)

    def failure(self, wait: Wait | None = None) -> PeerFailure | None:
        """The error with which this rank has to end, if it has to. The caller sets `is_told` and raises it."""
        verdict = self._reason(wait)
        return None if verdict is None else PeerFailure(verdict)

    def _reason(self, wait: Wait | None) -> str | None:
        if self._heartbeat.failure is None:
            waits = [*([] if wait is None else [wait]), *self._watches]
            return next((each.verdict for each in waits if each.verdict is not None), None)
        return self._heartbeat.failure + ("" if wait is None else f" (while waiting for {wait.describe()})")

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD_S)

    def _looked_at(self, elapsed_s: float) -> str | None:
        """Look at the heartbeats, and say why this rank has to end, if the main thread does not know yet.

        No reference to a wait outlives this call: its `detail` refers to a transfer, whose KV would not be freed.
        """
        with self._lock:
            waits, watches = list(self._waits), list(self._watches)
        for wait in [*watches, *waits]:
            if wait.verdict is None:
                wait.look(self._heartbeat, elapsed_s)
        if self.is_told or not self._engaged:
            return None
        return next((reason for wait in reversed(waits) if (reason := self._reason(wait))), self._reason(None))

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
