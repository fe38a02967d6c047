"""The ranks of a job: the only place that starts, names and ends process groups.

Control messages (small Python objects, barriers) always go over Gloo, whatever carries the K,V. They run in a thread
of their own, so that the main thread can notice a silent peer and say whom it waited for instead of hanging.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runahead.config import RanksOptions
from runahead.devices import choose_backend, choose_device, default_threads, keep_freed_memory
from runahead.heartbeat import Heartbeat

T = TypeVar("T")

NEVER = timedelta(days=20)
"""Timeout of the groups themselves: whether a peer is silent is decided by heartbeats. A Gloo group that timed out
is unusable, and its timeout knows nothing of a peer that is alive and busy."""

MEETING_S = 120.0
"""Seconds in which all ranks must have come, at least; processes of one job may start far apart."""

POLL_S = 0.05


class PeerFailure(RuntimeError):
    """A peer is silent, gone, or announced that it failed. The message names it and what was waited for."""


class SharedError(RuntimeError):
    """Another rank reports this error; this one only ends."""


class Ranks:
    """This process among the ranks of a job. One rank needs no launcher and no process group.

    Attributes:
        rank, size: place among the ranks.
        local_size: ranks of this host.
        device: where this rank computes.
        backend: "gloo" or "nccl", what carries K,V between ranks.
        timeout_s: silence after which a peer is given up.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
        local_size: int | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.backend = rank, size, device, backend
        self.timeout_s = timeout_s
        self.local_size = size if local_size is None else local_size
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._nccl_group: dist.ProcessGroup | None = None
        self._heartbeat: Heartbeat | None = None
        self._post_error: Exception | None = None
        self._collective: _Worker | None = None
        if size == 1:
            return
        try:
            if store is None:
                deadline = timedelta(seconds=max(timeout_s, MEETING_S))
                store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=deadline))
            _meet(store, rank, size, max(timeout_s, MEETING_S))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=NEVER)
            self._kv_group = dist.new_group(backend="gloo", timeout=NEVER)
        except RuntimeError as error:  # DistNetworkError, DistStoreError: no rendezvous
            raise ValueError(f"cannot meet the other ranks: {_first_line(error)}") from error
        self._control = dist.group.WORLD
        self._worker = _Worker("control")
        self._heartbeat = Heartbeat(store, rank, size, counts_processor_time=device.type == "cpu")
        dist.barrier()
        self._heartbeat.start()

    @classmethod
    def start(cls, options: RanksOptions, *, store: dist.Store | None = None) -> Ranks:
        """Join the job that torchrun (or the environment it sets) describes; without one, be the only rank.

        Raises:
            ValueError: more local ranks than GPUs, no CUDA where it is asked for, NCCL without CUDA, or no rendezvous.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        device = choose_device(options.device, local_rank, local_size)
        backend = choose_backend(options.backend, device)
        torch.set_num_threads(options.threads or default_threads(local_size))
        if device.type == "cpu":
            keep_freed_memory()
        return cls(
            rank,
            size,
            device=device,
            backend=backend,
            timeout_s=options.timeout_s,
            local_size=local_size,
            store=store,
        )

    # Waiting: everything that may block on a peer goes through these.

    def progress(self) -> None:
        """This rank got somewhere: a layer, a token. Silence is the absence of these.

        Raises:
            PeerFailure: another rank announced that it failed, so going on leads nowhere.
        """
        if self._heartbeat is None:
            return
        self._heartbeat.progress()
        if self._heartbeat.failure is not None:
            raise PeerFailure(self._heartbeat.failure)
        if self._post_error is not None:
            raise PeerFailure(f"lost the connection to another rank: {_first_line(self._post_error)}")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it is open this rank counts as alive without progress (loading a model)."""
        if self._heartbeat is None:
            yield
        else:
            with self._heartbeat.steady():
                yield

    def wait_until(self, ready: Callable[[float], bool], what: str, peers: Iterable[int]) -> None:
        """Wait until `ready(seconds to block at most)` is true.

        Raises:
            PeerFailure: a peer was silent for timeout_s meanwhile, or announced a failure.
        """
        if ready(0.0):
            return
        if self._heartbeat is None:  # the only rank waits for its own device
            while not ready(POLL_S):
                pass
            return
        silence_s = dict.fromkeys(frozenset(peers) - {self.rank}, 0.0)
        beats = dict.fromkeys(silence_s, -1)
        began = last = time.monotonic()
        with self._heartbeat.steady(frozenset(silence_s)):
            while not ready(POLL_S):
                if self._heartbeat.failure is not None:
                    raise PeerFailure(f"{self._heartbeat.failure} (while waiting for {what})")
                # A job that was suspended and goes on has not been silent: a long gap counts for a short one.
                now = time.monotonic()
                elapsed_s, last = min(now - last, 10 * POLL_S), now
                for peer in silence_s:
                    beat = self._heartbeat.seen[peer]
                    silence_s[peer] = silence_s[peer] + elapsed_s if beat == beats[peer] else 0.0
                    beats[peer] = beat
                    if silence_s[peer] > self.timeout_s:
                        raise PeerFailure(
                            f"rank {peer} has been silent for {silence_s[peer]:.0f} s; waited {now - began:.0f} s "
                            f"for {what} (ranks.timeout_s={self.timeout_s:g})"
                        )

    def fail(self, message: str) -> None:
        """Announce that this rank fails, so that no other waits for it. The ranks are lost then."""
        if self._heartbeat is not None:
            self._heartbeat.announce_failure(f"rank {self.rank} failed: {message}")

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """What is raised inside is announced: see `fail`."""
        try:
            yield
        except BaseException as error:
            self.fail(_first_line(error))
            raise

    # Control messages.

    def control(self, what: str, call: Callable[[], T], peers: Iterable[int] | None = None) -> T:
        """Result of a blocking call on the control group, watched over.

        Raises:
            PeerFailure: as in `wait_until`, or a connection was lost.
        """
        job = self._worker.submit(call)
        self.wait_until(lambda block_s: job.done.wait(block_s), what, range(self.size) if peers is None else peers)
        if job.error is not None:
            raise PeerFailure(f"lost the connection while waiting for {what}: {_first_line(job.error)}") from job.error
        return job.result

    def post(self, call: Callable[[], object]) -> None:
        """Run a blocking call on the control group behind those before it, without waiting for it.

        An error of it is raised by the next `progress`.
        """

        def guarded() -> None:
            try:
                call()
            except Exception as error:
                self._post_error = self._post_error or error

        self._worker.submit(guarded)

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""
        if self.size > 1:
            self.control(what, lambda: dist.barrier(self._control))

    def broadcast(self, value: T, source: int, what: str) -> T:
        """The source rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value if self.rank == source else None]
        peers = None if self.rank == source else [source]
        self.control(what, lambda: dist.broadcast_object_list(box, src=source, group=self._control), peers)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T, what: str) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self.control(what, lambda: dist.all_gather_object(values, value, group=self._control))
        return values

    def agree(self, what: str, call: Callable[[], T]) -> T:
        """Rank 0's result of `call`, on every rank; the others do not call it.

        Raises:
            whatever `call` raises, on rank 0; SharedError with its message on the others.
        """
        error: Exception | None = None
        result: Any = None
        if self.rank == 0:
            try:
                with self.busy():
                    result = call()
            except Exception as caught:
                error = caught
        result, message = self.broadcast((result, None if error is None else _first_line(error)), 0, what)
        if error is not None:
            raise error
        if message is not None:
            raise SharedError(message)
        return result

    def together(self, what: str, call: Callable[[], T]) -> T:
        """This rank's result of `call`, once it succeeded on every rank.

        Raises:
            whatever `call` raises, on the lowest rank where it fails; SharedError on the others.
        """
        error: Exception | None = None
        result: Any = None
        try:
            with self.busy():
                result = call()
        except Exception as caught:
            error = caught
        messages = self.gather(None if error is None else _first_line(error), what)
        first = next((rank for rank, message in enumerate(messages) if message is not None), None)
        if first is None:
            return result
        if error is not None and first == self.rank:
            raise error
        raise SharedError(f"rank {first}: {messages[first]}") from error

    def clock_offset_s(self, rounds: int = 7) -> float:
        """Seconds to add to this rank's `time.perf_counter` to get rank 0's, by Cristian's algorithm.

        Every rank calls it. Each exchange bounds the offset by its round trip; the shortest one counts.
        """
        best, offset = float("inf"), 0.0
        for peer in range(1, self.size):
            for _ in range(rounds if self.rank in (0, peer) else 0):
                stamp = torch.zeros(1, dtype=torch.float64)
                sent = time.perf_counter()
                if self.rank == 0:
                    self.control("a clock", partial(_answer_with_time, stamp, peer), [peer])
                else:
                    self.control("a clock", partial(_ask_for_time, stamp, 0), [0])
                    received = time.perf_counter()
                    if received - sent < best:
                        best, offset = received - sent, float(stamp) - (sent + received) / 2
        return offset

    # Links for K,V.

    @property
    def kv_group(self) -> dist.ProcessGroup:
        """The Gloo group that carries K,V between CPUs (or staged through host memory)."""
        return self._kv_group

    def nccl_links(self, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
        """One NCCL group per directed link, made on first use by all ranks in the same order, and warmed up.

        Point-to-point work of one NCCL group shares one stream and is matched in the order of issue, so links that
        must not wait for each other need groups of their own.
        """
        for link in links:
            if link not in self._links:
                group = dist.new_group(list(link), backend="nccl", timeout=NEVER, device_id=self.device)
                self._links[link] = group
                if self.rank in link:
                    token = torch.zeros(1, device=self.device)
                    if self.rank == link[0]:
                        dist.send(token, link[1], group=group)
                    else:
                        dist.recv(token, link[0], group=group)
                    torch.cuda.synchronize(self.device)
        return self._links

    def nccl_group(self) -> dist.ProcessGroup:
        """An NCCL group of all ranks with all pairs connected, made on first use by all ranks."""
        if self._nccl_group is None:
            group = dist.new_group(backend="nccl", timeout=NEVER, device_id=self.device)
            token = torch.zeros(self.size, device=self.device)
            peers = [peer for peer in range(self.size) if peer != self.rank]
            receives = [dist.P2POp(dist.irecv, token[peer : peer + 1], peer, group) for peer in peers]
            sends = [dist.P2POp(dist.isend, token[self.rank : self.rank + 1], peer, group) for peer in peers]
            for work in dist.batch_isend_irecv(receives + sends):
                work.wait()
            torch.cuda.synchronize(self.device)
            self._nccl_group = group
        return self._nccl_group

    def collective_group(self) -> dist.ProcessGroup:
        """A group of all ranks for collectives, which carries K,V at other times. Every rank calls it."""
        return self.nccl_group() if self.backend == "nccl" else self._kv_group

    def collectively(self, what: str, call: Callable[[], T]) -> T:
        """Result of a call that runs collectives of `collective_group`, in a thread of their own, watched over.

        Whether it computes or waits cannot be told, so meanwhile this rank counts as alive as long as its process runs.

        Raises:
            PeerFailure: as in `wait_until`, or a connection was lost.
            whatever else `call` raises.
        """
        if self._collective is None:
            self._collective = _Worker("collectives")
            if self.device.type == "cuda":
                self._collective.submit(lambda: torch.cuda.set_device(self.device))  # threads do not inherit it

        def finished() -> T:
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return result

        job = self._collective.submit(finished)
        self.wait_until(lambda block_s: job.done.wait(block_s), what, range(self.size))
        if job.error is None:
            return job.result
        if isinstance(job.error, dist.DistError) or "gloo" in str(job.error).lower():
            message = f"lost the connection to another rank while waiting for {what}; see that rank's messages"
            raise PeerFailure(message) from job.error
        raise job.error

    def close(self) -> None:
        """Leave the job: every rank calls it once all went well."""
        if self.size == 1 or not dist.is_initialized():
            return
        self.barrier("the end")
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._worker.close()
        if self._collective is not None:
            self._collective.close()
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def _meet(store: dist.Store, rank: int, size: int, patience_s: float) -> None:
    """Return once all ranks have come.

    Raises:
        ValueError: names those that have not.
    """
    here = dist.PrefixStore("runahead-here", store)
    here.set(str(rank), "")
    deadline = time.monotonic() + patience_s
    while missing := [peer for peer in range(size) if not here.check([str(peer)])]:
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank {', '.join(map(str, missing))} of {size} did not start within {patience_s:.0f} s; check its "
                "host and its messages"
            )
        time.sleep(POLL_S)


def _ask_for_time(stamp: torch.Tensor, peer: int) -> None:
    dist.send(stamp, peer, tag=1)
    dist.recv(stamp, peer, tag=2)


def _answer_with_time(stamp: torch.Tensor, peer: int) -> None:
    dist.recv(stamp, peer, tag=1)
    stamp[0] = time.perf_counter()
    dist.send(stamp, peer, tag=2)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error
        self.done.set()


class _Worker:
    """A daemon thread that runs blocking calls in order; one that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> _Job:
        job = _Job(call)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
