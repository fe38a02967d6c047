"""Waiting for other ranks with a time limit. Every call that may block on a peer goes through here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from runahead.failures import PeerFailure, first_line, line_of
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.meeting.presence import Presence
from runahead.ranks.meeting.rendezvous import POLL_S
from runahead.ranks.mesh import Mesh
from runahead.ranks.watcher import Wait, Watcher

LAST_CHANCE_S = 2.0
"""Grace period for messages of a peer that has already exited, as all ranks do after the last barrier."""

ANNOUNCED_S = 0.75
"""Seconds to wait, after a connection was lost, for the heartbeat to say why."""

MERCY_S = 1.5
"""Seconds that a silent process gets to end by itself before it is killed."""


class Waiting:
    """Base class of `Ranks` with all that waits for peers. Heartbeat and watcher are None for a single rank.

    Attributes:
        rank, size: number of this rank, and of ranks.
        mesh: arrangement of the ranks; each is a stage of its own unless `Ranks.arrange` says otherwise.
        timeout_s: seconds of silence after which a peer is given up.
        present: the processes of all ranks; empty for a single rank.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.mesh = Mesh(size)
        self.present: list[Presence] = []
        self._heartbeat: Heartbeat | None = None
        self._watcher: Watcher | None = None
        self._when_stuck: Callable[[PeerFailure], object] | None = None
        self._stopped: list[Presence] = []
        """Processes of this machine that were stopped before they had come to the rendezvous."""
        self._post_error: Exception | None = None

    def name(self, rank: int) -> str:
        """A rank in messages; see `Mesh.name`."""
        return self.mesh.name(rank)

    def progress(self) -> None:
        """Report progress of this rank, such as a layer or a token. A rank that reports none counts as silent.

        Raises:
            PeerFailure: another rank has failed, so this one must end too.
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
        """Context manager in which this rank counts as working without reporting progress, as in loading a model."""
        if self._heartbeat is None or self._watcher is None:
            yield
        else:
            with self._watcher.engaged(), self._heartbeat.busy():
                yield

    def wait_until(
        self, ready: Callable[[float], bool], what: str, peers: Iterable[int], detail: Callable[[], str] | None = None
    ) -> None:
        """Wait until `ready` returns true.

        Args:
            ready: called with the seconds that it may block.
            what: what is waited for, for messages.
            peers: ranks that can delay it.
            detail: called for more detail when the wait fails.

        Raises:
            PeerFailure: a peer was silent for `timeout_s`, has ended or announced a failure; or no rank made progress
                for `timeout_s`.
        """
        if ready(0.0):
            return
        if self._watcher is None:  # a single rank only waits for its own device
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

    @contextmanager
    def watching(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Context manager in which this rank ends if a peer falls silent, also while it does other work than waiting.

        `progress` and `wait_until` raise the error.

        Args:
            what: what is needed of the peers, for messages.
        """
        if self._watcher is None:
            yield
        else:
            with self._watcher.watching(what, peers):
                yield

    @property
    def waiting_for(self) -> Wait | None:
        """The wait that is under way, else the last one that failed, if any."""
        return None if self._watcher is None else self._watcher.current

    @property
    def beats(self) -> list[int]:
        """Last heartbeat seen of every rank, -1 for none. Heartbeats are read only while this rank waits or watches."""
        return [] if self._heartbeat is None else self._heartbeat.seen

    def when_stuck(self, call: Callable[[PeerFailure], object]) -> None:
        """Set what to call, in another thread, when this rank has to end but its main thread does not.

        Its main thread is then in a library call that takes long or never returns. By default nothing is called, so
        that users of the library keep control of their process.
        """
        self._when_stuck = call
        if self._watcher is not None:
            self._watcher.when_stuck = call

    def known_failure(self) -> str | None:
        """Describe a failure of another rank, if one is known or can be found out now."""
        if self._heartbeat is None:
            return None
        return self._heartbeat.failure or self._heartbeat.announced() or self._heartbeat.find_ended()

    def lost_connection(self, while_waiting_for: str) -> PeerFailure:
        """Make the error for a lost connection, with the failure that the rank at its other end announced, if any."""
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
        """Kill the processes of this machine that the last wait found silent, since stopped ones do not end."""
        wait = self.waiting_for
        silent = [self.present[peer] for peer in ([] if wait is None else wait.silent)]
        silent = [*self._stopped, *(process for process in silent if process.is_beside(self.present[self.rank]))]
        deadline = time.monotonic() + MERCY_S  # a process that was only cut off ends by itself about now
        while any(not each.has_ended and not each.is_stopped for each in silent) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in silent:
            if not process.has_ended:
                with suppress(OSError):  # another user's process
                    os.kill(process.pid, signal.SIGKILL)

    def fail(self, message: str) -> None:
        """Announce that this rank fails, so that no other waits for it. The job cannot go on after that."""
        self._announce(f"{self.name(self.rank)} failed: {message}")

    def _announce(self, message: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.announce_failure(message)

    @contextmanager
    def announcing_failure(self) -> Iterator[None]:
        """Context manager that announces whatever is raised inside, so that all ranks fail together; see `fail`."""
        try:
            with nullcontext() if self._watcher is None else self._watcher.engaged():
                yield
        except PeerFailure as error:
            self._announce(f"{self.name(self.rank)} says: {first_line(error)}")
            raise
        except BaseException as error:
            # A launcher may have sent this process a signal because another rank has ended.
            if isinstance(error, Exception) or self.known_failure() is None:
                self.fail(line_of(error))
            raise
