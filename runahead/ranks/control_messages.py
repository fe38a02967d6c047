"""Control messages between ranks: small Python objects, barriers, and errors that end every rank.

They are sent over Gloo by a thread of their own, so that the main thread can notice a silent peer and name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runahead.failures import PeerFailure, RunFailure, SharedError, is_mistake, line_of
from runahead.ranks.agreement import disagreement
from runahead.ranks.meeting.seal import Seal
from runahead.ranks.objects import broadcast_object, gather_objects
from runahead.ranks.waiting import Waiting
from runahead.ranks.worker import Worker

T = TypeVar("T")

ON_ITS_WAY_S = 0.5
"""Seconds for a message that a peer has sent before it failed."""


class ControlMessages(Waiting):
    """Collectives of small objects on the control group; a base class of `Ranks`, which sets up group and thread.

    Attributes:
        seal: of the messages of this job, whose key its ranks share once they have met.
    """

    _control: dist.ProcessGroup
    _worker: Worker
    seal: Seal
    _num_objects = 0

    def control(self, what: str, call: Callable[[], T], peers: Iterable[int] | None = None) -> T:
        """Run a blocking call on the control group in the control thread and return its result.

        Args:
            what: what the call waits for, for messages.
            peers: ranks that can delay it; all by default.

        Raises:
            PeerFailure: as for `wait_until`, or a connection was lost.
            RunFailure: a message came that no rank has sent.
        """
        job = self._worker.submit(call)
        try:
            self.wait_until(lambda block_s: job.done.wait(block_s), what, range(self.size) if peers is None else peers)
        except PeerFailure:
            # What a rank sends before it ends, such as why, may arrive after its heartbeat has said so.
            if not job.done.wait(ON_ITS_WAY_S) or job.error is not None:
                raise
        if isinstance(job.error, RunFailure):  # a stranger's message
            raise job.error
        if job.error is not None:
            raise self.lost_connection(what) from job.error
        return job.result

    def post(self, call: Callable[[], object]) -> None:
        """Queue a blocking call on the control group, to run after those queued before, and return at once.

        If it fails, the next `progress` raises its error.
        """

        def guarded() -> None:
            try:
                call()
            except Exception as error:
                self._post_error = self._post_error or error

        self._worker.submit(guarded)

    def barrier(self, what: str) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            self.control(what, lambda: dist.barrier(self._control))

    def broadcast(self, value: T, source: int, what: str) -> T:
        """Return the source rank's value on every rank."""
        if self.size == 1:
            return value
        peers, about = None if self.rank == source else [source], self._about_next()
        return self.control(what, lambda: broadcast_object(value, source, self._control, self.seal, about), peers)

    def gather(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        about = self._about_next()
        return self.control(what, lambda: gather_objects(value, self._control, self.seal, about))

    def _about_next(self) -> str:
        """What the next object is about: ranks exchange all of them in the same order."""
        self._num_objects += 1
        return f"object {self._num_objects}"

    def on_rank_0(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only, and return its result on every rank. Every rank calls this.

        Raises:
            Exception: on rank 0, whatever `call` raises.
            SharedError: on the other ranks, with the same message.
        """
        error: Exception | None = None
        result: Any = None
        if self.rank == 0:
            try:
                with self.busy():
                    result = call()
            except Exception as caught:
                error = caught
        result, message, is_mistake = self.broadcast((result, *_told(error)), 0, what)
        if error is not None:
            raise error
        if message is not None:
            raise SharedError(message, is_mistake=is_mistake)
        return result

    def on_all_ranks(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on every rank, and return this rank's result once all have succeeded; else all fail together.

        Raises:
            Exception: whatever `call` raises, on the lowest rank where it fails.
            SharedError: on the other ranks, with that rank's message.
        """
        error: Exception | None = None
        result: Any = None
        try:
            with self.busy():
                result = call()
        except Exception as caught:
            error = caught
        told = self.gather(_told(error), what)
        first = next((rank for rank, (message, _) in enumerate(told) if message is not None), None)
        if first is None:
            return result
        if error is not None and first == self.rank:
            raise error
        message, is_mistake = told[first]
        raise SharedError(f"{self.name(first)}: {message}", is_mistake=is_mistake) from error

    def require_same(self, facts: Mapping[str, str], remedy: str) -> None:
        """Check that all ranks hold the same facts. Every rank calls this.

        Args:
            facts: values by name; see runahead/ranks/agreement.py.
            remedy: end of the error message.

        Raises:
            ValueError: on rank 0, names the ranks that differ and in what.
            SharedError: on the other ranks, with the same message.
        """
        differing = disagreement(self.gather(dict(facts), "the options of all ranks"))
        if differing is not None:
            message = f"{differing}; {remedy}"
            raise ValueError(message) if self.rank == 0 else SharedError(message, is_mistake=True)

    def clock_offset_s(self, rounds: int = 7) -> float:
        """Seconds to add to this rank's `time.perf_counter` to get rank 0's, by Cristian's algorithm (1989).

        Every rank calls this. The error of an exchange is at most half its round trip, so of `rounds` exchanges with
        each rank the one with the shortest round trip is used.
        """
        best, offset = float("inf"), 0.0
        for peer in range(1, self.size):
            for _ in range(rounds if self.rank in (0, peer) else 0):
                stamp = torch.zeros(1, dtype=torch.float64)
                sent = time.perf_counter()
                if self.rank == 0:
                    self.control("the clock of another rank", partial(_answer_with_time, stamp, peer), [peer])
                else:
                    self.control("the clock of another rank", partial(_ask_for_time, stamp, 0), [0])
                    received = time.perf_counter()
                    if received - sent < best:
                        best, offset = received - sent, float(stamp) - (sent + received) / 2
        return offset


def _told(error: Exception | None) -> tuple[str | None, bool]:
    """Message of an error for the other ranks, None without one, and whether it is a user's mistake."""
    return (None, False) if error is None else (line_of(error), is_mistake(error))


def _ask_for_time(stamp: torch.Tensor, peer: int) -> None:
    dist.send(stamp, peer, tag=1)
    dist.recv(stamp, peer, tag=2)


def _answer_with_time(stamp: torch.Tensor, peer: int) -> None:
    dist.recv(stamp, peer, tag=1)
    stamp[0] = time.perf_counter()
    dist.send(stamp, peer, tag=2)
