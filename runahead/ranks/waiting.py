"""How a rank waits for others: everything that may block on a peer goes through here, so nothing waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from runahead.failures import PeerFailure, first_line
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.rendezvous import POLL_S, Presence
from runahead.ranks.watcher import Wait, Watcher

LAST_CHANCE_S = 2.0
"""What has been sent is taken though a peer has ended: behind the last barrier of a good job all of them end."""

ANNOUNCED_S = 0.75
"""A connection may end before the heartbeat brings the news why."""

MERCY_S = 1.5


class Waiting:
    """A rank as far as it waits; heartbeat and watcher are there once it has met others.

    Attributes:
        rank, size: place among the ranks.
        timeout_s: silence after which a peer is given up.
        present: the processes of all ranks; empty if this is the only one.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.present: list[Presence] = []
        self._heartbeat: Heartbeat | None = None
        self._watcher: Watcher | None = None
        self._post_error: Exception | None = None

    def progress(self) -> None:
        """This rank got somewhere: a layer, a token. Silence is the absence of these.

        Raises:
            PeerFailure: another rank announced that it failed, so going on leads nowhere.
        """
        if self._heartbeat is None or self._watcher is None:
            return
        self._heartbeat.progress()
        if (failure := self._watcher.failure()) is not None:
            self._watcher.is_told = True
            raise failure
        if self._post_error is not None:
            raise self.lost_connection("tokens to leave") from self._post_error

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it is open this rank counts as working without progress (loading a model)."""
        if self._heartbeat is None or self._watcher is None:
            yield
        else:
            with self._watcher.engaged(), self._heartbeat.busy():
                yield

    def wait_until(
        self,
        ready: Callable[[float], bool],
        what: str,
        peers: Iterable[int],
        detail: Callable[[], str] | None = None,
    ) -> None:
        """Wait until `ready(seconds to block at most)` is true.

        Args:
            what: is waited for, for messages; `detail` is asked for more where it will not come.
            peers: who can hold it up.

        Raises:
            PeerFailure: a peer was silent for timeout_s meanwhile, or has ended, or announced a failure; or no rank
                got anywhere for timeout_s.
        """
        if ready(0.0):
            return
        if self._watcher is None:  # the only rank waits for its own device
            while not ready(POLL_S):
                pass
            return
        with self._watcher.waiting(what, peers, detail) as wait:
            while not ready(POLL_S):
                if (failure := self._watcher.failure(wait)) is not None:
                    if self._heartbeat is not None and self._heartbeat.is_end and ready(LAST_CHANCE_S):
                        return
                    self._watcher.is_told = True
                    raise failure

    @property
    def waiting_for(self) -> Wait | None:
        """What this rank waits for, or waited for in vain."""
        return None if self._watcher is None else self._watcher.current

    @property
    def beats(self) -> list[int]:
        """The last heartbeat that was seen of every rank; -1 for none, and while this rank waited for nobody."""
        return [] if self._heartbeat is None else self._heartbeat.seen

    def when_stuck(self, call: Callable[[PeerFailure], object]) -> None:
        """Have `call` called, in another thread, should this rank have to end and not do so by itself.

        Then its main thread is in a call of a library that does not return, or takes long. Without such a call a
        library's user is left alone.
        """
        if self._watcher is not None:
            self._watcher.when_stuck = call

    def known_failure(self) -> str | None:
        """What is known to have gone wrong on another rank; it may just have happened."""
        if self._heartbeat is None:
            return None
        return self._heartbeat.failure or self._heartbeat.announced() or self._heartbeat.find_ended()

    def lost_connection(self, while_waiting_for: str) -> PeerFailure:
        """What to raise where a connection ended: usually because the rank at its other end did, and it said why."""
        if self._heartbeat is None or self._watcher is None:
            return PeerFailure(f"lost the connection while waiting for {while_waiting_for}")
        deadline = time.monotonic() + ANNOUNCED_S
        with self._watcher.waiting(while_waiting_for, ()):
            while self._heartbeat.failure is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            failure = self.known_failure()
        if failure is None:
            return PeerFailure(f"lost the connection while waiting for {while_waiting_for}")
        return PeerFailure(f"{failure} (while waiting for {while_waiting_for})")

    def kill_silent(self) -> None:
        """End the processes of this machine that were silent: stopped or stuck, they do not end by themselves."""
        wait = self.waiting_for
        silent = [self.present[peer] for peer in ([] if wait is None else wait.silent)]
        silent = [process for process in silent if process.is_beside(self.present[self.rank])]
        deadline = time.monotonic() + MERCY_S  # those that were only cut off find out at the same time
        while not all(process.has_ended for process in silent) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in silent:
            if not process.has_ended:
                with suppress(OSError):  # another user's
                    os.kill(process.pid, signal.SIGKILL)

    def fail(self, message: str) -> None:
        """Announce that this rank fails, so that no other waits for it. The ranks are lost then."""
        self._announce(f"rank {self.rank} failed: {message}")

    def _announce(self, message: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.announce_failure(message)

    @contextmanager
    def announcing_failure(self) -> Iterator[None]:
        """What is raised inside is announced: see `fail`."""
        try:
            with nullcontext() if self._watcher is None else self._watcher.engaged():
                yield
        except PeerFailure as error:
            self._announce(f"rank {self.rank} says: {first_line(error)}")
            raise
        except BaseException as error:
            # A signal that ends this process may be what a launcher does because another one has ended.
            if isinstance(error, Exception) or self.known_failure() is None:
                self.fail(first_line(error))
            raise
