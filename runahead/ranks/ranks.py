"""The ranks of a job. No module but this one and its base classes creates or destroys process groups.

Control messages always go over Gloo, also where NCCL carries KV.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from runahead.config import Backend, Device, RanksOptions
from runahead.failures import PeerFailure, RunFailure, SharedError, first_line
from runahead.place import JobPlace
from runahead.ranks.accelerator import Event, accelerator_for, prepare_environment
from runahead.ranks.agreement import library_facts
from runahead.ranks.devices import (
    RankThreads,
    check_own_gpus,
    choose_backend,
    choose_device,
    default_threads,
    gpu_name,
    keep_freed_memory,
    threads_while,
)
from runahead.ranks.groups import NEVER, ProcessGroups
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.mapped.memory import HostMemory, MappedSegment, SharedBytes, Unmapped, map_other
from runahead.ranks.mapped.queues import Copying, DeviceCopying, HostCopying
from runahead.ranks.meeting.local_store import LocalStore, is_on_one_host, listen_on_loopback
from runahead.ranks.meeting.rendezvous import POLL_S, StoppedRanks, environment_store, meet, store_of_job
from runahead.ranks.meeting.seal import job_seal
from runahead.ranks.meeting.signed_store import SECRET, job_secret
from runahead.ranks.mesh import Mesh
from runahead.ranks.objects import gather_objects
from runahead.ranks.transfer_records import TransferRecords
from runahead.ranks.watcher import Watcher
from runahead.ranks.worker import Worker

__all__ = ["PeerFailure", "Ranks", "SharedError"]

T = TypeVar("T")

ABORT_S = 5.0
"""Seconds that a rank spends at most on ending its graphs and NCCL operations after an error."""

LEAST_LIMIT_S, LIMIT_FACTOR = 600.0, 20.0
"""A call that a GPU computes counts as working for so many seconds, or so many times the longest such call so far.

Generous, since nothing tells a long computation from a collective that never ends: Llama-3-8B computes a prompt of a
million tokens in an estimated six minutes on two H100s.
"""

MEETING_S = 120.0
"""Least number of seconds to wait for all ranks at the rendezvous; processes of one job may start far apart."""


class Ranks(ProcessGroups):
    """This process as one rank of a job. A single rank needs no launcher and no process group; several `join` first.

    Attributes:
        rank, size: number of this rank, and of ranks.
        mesh: arrangement of the ranks in stages and shares; see `arrange`.
        local_size: number of ranks on this host.
        device: where this rank computes.
        accelerator: streams and communicators of its GPU; None on a CPU.
        backend: "gloo" or "nccl", which carries KV between ranks.
        timeout_s: seconds of silence after which a peer is given up.
        present: the processes of all ranks; empty for a single rank.
        records: this rank's last KV transfers.
        copying: copies to and from ranks of this host, once `map_memory` has found that there can be any.
        mapped_links: pairs of ranks, in either order, that have mapped each other's memory.
        unmapped: why ranks of one host have not mapped each other's memory; None if all have.
        threads: of the ranks of this host that compute on its CPUs, by rank; empty for a single rank.
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
    ) -> None:
        super().__init__(rank, size, timeout_s)
        self.device, self.backend, self.accelerator = device, backend, accelerator_for(device)
        self.local_size = size if local_size is None else local_size
        self.records = TransferRecords()
        self.copying: Copying | None = None
        self.mapped_links: set[tuple[int, int]] = set()
        self.unmapped: str | None = None
        self.threads: dict[int, RankThreads] = {}
        self._is_mapped = False
        self._store: dist.Store | None = None
        self._num_in_stage = 0
        self._collective: Worker | None = None
        self._longest_call_s = 0.0

    def join(self, *, num_shares: int = 1, store: dist.Store | None = None, may_share_gpus: bool = False) -> Ranks:
        """Meet the other ranks, connect to them, and arrange all in stages of `num_shares` ranks. Returns this object.

        After an error the process has to end: ranks that have met keep what they met by.

        Args:
            store: for the rendezvous; by default made from the environment variables.
            may_share_gpus: several ranks may have the same GPU, to try on one what is meant for several. It is no
                faster, and NCCL refuses it.

        Raises:
            ValueError: the ranks differ in versions or code, share a GPU, or make no whole stages.
            RunFailure: the ranks cannot meet. As a PeerFailure: a rank was stopped while it started, or fell silent.
        """
        if self.size > 1:
            store = self._meet(store)
            with self.announcing_failure():
                self.control("the connections between all ranks", partial(self._connect, store))
        if not may_share_gpus:
            gpus = self.gather(gpu_name(self.device), "the GPUs")
            self.on_rank_0("the GPUs", lambda: check_own_gpus(gpus))
        self.arrange(self.on_rank_0("the mesh", lambda: Mesh.with_shares(self.size, num_shares)).num_shares)
        if self.size > 1:
            here = RankThreads.here() if self.device.type == "cpu" else None
            numbers = enumerate(self.gather(here, "the threads"))
            is_here = {rank: rank == self.rank or self._is_beside(rank) for rank in range(self.size)}
            self.threads = {rank: each for rank, each in numbers if each is not None and is_here[rank]}
        return self

    def _meet(self, store: dist.Store | None) -> dist.Store:
        """Wait for all ranks at the rendezvous, and begin to watch their heartbeats. Returns the job's store."""
        patience_s, began_s, main_thread = max(self.timeout_s, MEETING_S), time.monotonic(), threading.get_ident()
        stopped = None if store is not None else StoppedRanks(self.timeout_s)

        def rendezvous() -> dist.Store:
            self._store = environment_store(self.rank, self.size, patience_s) if store is None else store
            of_job = store_of_job(self._store, self.rank)
            facts = library_facts() | {"the backend": self.backend}
            # Made before the ranks meet, so that its first beat is in the store when another rank reads it.
            computing = main_thread if self.device.type == "cpu" else None
            self._heartbeat = Heartbeat(of_job, self.rank, self.size, computing=computing, name=self.name)
            self.present = meet(of_job, self.rank, self.size, facts, patience_s=patience_s)
            return of_job

        # In a thread, since the store of a process that is stopped does not answer.
        job = Worker("rendezvous").submit(rendezvous)
        while not job.done.wait(POLL_S):
            given_up = {} if stopped is None else stopped.look()
            if given_up:
                self._stopped = list(given_up)
                who = " and ".join(f"{self.name(each.rank)} (process {each.pid} on {each.host})" for each in given_up)
                failure = (
                    f"{who} has been stopped for {max(given_up.values()):.0f} s; waited "
                    f"{time.monotonic() - began_s:.0f} s for all ranks to start (ranks.timeout_s={self.timeout_s:g})"
                )
                self._announce(f"{self.name(self.rank)} says: {failure}")
                raise PeerFailure(failure)
            if not job.done.is_set() and (announced := self.known_failure()) is not None:
                raise PeerFailure(f"{announced} (while waiting for all ranks to start)")
        if isinstance(job.error, RuntimeError) and not isinstance(job.error, RunFailure | SharedError):
            # DistNetworkError, DistStoreError: no rendezvous
            raise RunFailure(f"cannot meet the other ranks: {first_line(job.error)}") from job.error
        if job.error is not None:
            raise job.error
        assert self._heartbeat is not None
        self._worker = Worker("control")
        self._watcher = Watcher(self._heartbeat, self.rank, self.timeout_s, self.name)
        self._watcher.when_stuck = self._when_stuck
        self._heartbeat.start(self.present)
        self._watcher.start()
        met: dist.Store = job.result
        return met

    def _connect(self, store: dist.Store) -> None:
        self.seal = job_seal(store, self.rank, self.size, job_secret(os.environ) or b"")
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=NEVER)
        self._kv_group = dist.new_group(backend="gloo", timeout=NEVER)
        assert dist.group.WORLD is not None
        self._control = dist.group.WORLD
        dist.barrier()

    @classmethod
    def start(cls, options: RanksOptions, *, store: dist.Store | None = None) -> Ranks:
        """Join the job that torchrun's environment variables describe; without them, be the only rank.

        Args:
            store: for the rendezvous; by default made from the environment variables.

        Raises: as `of` and `join`.
        """
        return cls.before_joining(options).join(num_shares=options.tensor, store=store)

    @classmethod
    def before_joining(cls, options: RanksOptions) -> Ranks:
        """This process as a rank that has not joined its job yet: a program that fails while it joins can report it.

        Raises:
            ValueError: CUDA is asked for but not available, NCCL is asked for without CUDA, or an environment variable
                makes no sense, or would make the ranks wait for each other for ever; or the job's secret cannot be
                used.
        """
        place = JobPlace.from_environment()
        size, local_rank, local_size = place.size, place.local_rank, place.local_size
        if size > 1 and is_on_one_host(os.environ):
            listen_on_loopback(os.environ)
        elif size > 1 and job_secret(os.environ) is None and place.rank == 0:
            warnings.warn(
                f"the ranks of this job are on several hosts and have no secret, so whoever reaches port "
                f"{os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')} can end it, or answer in their "
                f"place; set {SECRET} on all hosts (docs/reliability.md)",
                stacklevel=2,
            )
        may_use_nccl = options.backend is not Backend.gloo and options.device is not Device.cpu
        if size > 1 and may_use_nccl and torch.backends.cuda.is_built():
            for sentence in prepare_environment():
                warnings.warn(sentence, stacklevel=2)
        device = choose_device(options.device, local_rank, local_size)
        backend = choose_backend(options.backend, device)
        torch.set_num_threads(options.threads or default_threads(local_size))
        if device.type == "cpu":
            keep_freed_memory()
        return cls(place.rank, size, device=device, backend=backend, timeout_s=options.timeout_s, local_size=local_size)

    def map_memory(self) -> bool:
        """Map memory between the ranks of each host, unless that was done before. Every rank calls this.

        Returns:
            whether two ranks anywhere have; the same on all ranks. Then each rank has `copying`.
        """
        if self._is_mapped or self.size == 1:
            return self.copying is not None
        self._is_mapped = True
        num_bytes, own, reason = MappedSegment.num_bytes(self.size), None, None
        try:
            own = SharedBytes(num_bytes)
        except Unmapped as error:
            reason = str(error)
        segments = {self.rank: MappedSegment(mmap.mmap(-1, num_bytes) if own is None else own.memory, self.size)}
        descriptors = self.gather(None if own is None else own.descriptor, "the memory that ranks share")
        beside = [each.rank for each in self.present if self._is_beside(each.rank)]
        for peer, descriptor in enumerate(descriptors):
            if own is not None and descriptor is not None and peer in beside:
                try:
                    memory = map_other(self.present[peer].pid, int(descriptor), num_bytes)
                    segments[peer] = MappedSegment(memory, self.size)
                except Unmapped as error:
                    reason = str(error)
        mapped = self.gather((sorted(segments), beside, reason), "the memory that ranks have mapped")
        self.mapped_links = {
            (rank, peer)
            for rank, (have, _, _) in enumerate(mapped)
            for peer in have
            if peer != rank and rank in mapped[peer][0]
        }
        reasons = [each for _, _, each in mapped if each is not None]
        if any((rank, peer) not in self.mapped_links for rank, (_, near, _) in enumerate(mapped) for peer in near):
            self.unmapped = reasons[0] if reasons else "of another user"
        if self.mapped_links:
            mutual = {peer: each for peer, each in segments.items() if (self.rank, peer) in self.mapped_links}
            mutual[self.rank] = segments[self.rank]
            copying, reason = None, None
            try:
                copying = self._copying_between(mutual)
            except Unmapped as error:
                reason = str(error)
            reasons = [each for each in self.gather(reason, "streams that wait for memory") if each is not None]
            if reasons:
                self.unmapped, self.mapped_links = reasons[0], set()
            else:
                self.copying = copying
        return self.copying is not None

    def _copying_between(self, segments: dict[int, MappedSegment]) -> Copying:
        pids = [presence.pid for presence in self.present]
        if self.accelerator is None:
            return HostCopying(HostMemory(self.rank, segments, pids), self._kv_group)
        return DeviceCopying(self.accelerator, DeviceMemory(self.rank, segments, pids, self.device))

    @contextmanager
    def lending(self, stages: Iterable[int]) -> Iterator[None]:
        """Context manager in which only these stages compute, with the threads of all ranks of their hosts' CPUs.

        It is entered where the others have computed what they had to, or a little before, and left before they go on.
        """
        own, number = torch.get_num_threads(), self.num_threads(stages)
        if number <= own:
            yield
            return
        self._set_threads(number)
        try:
            yield
        finally:
            self._set_threads(own)

    def num_threads(self, stages: Iterable[int]) -> int:
        """Intra-op threads of this rank while only these stages compute."""
        if not self.threads:
            return torch.get_num_threads()
        computing = [rank for stage in stages for rank in self.mesh.members(stage)]
        return threads_while(computing, self.threads, self.rank) if self.rank in computing else torch.get_num_threads()

    def _set_threads(self, number: int) -> None:
        """Set the number of intra-op threads, which OpenMP has for each thread that computes."""
        torch.set_num_threads(number)
        if self._collective is not None:
            self._collective.submit(partial(torch.set_num_threads, number))

    def _is_beside(self, peer: int) -> bool:
        return peer != self.rank and self.present[peer].is_beside(self.present[self.rank])

    def await_event(
        self, event: Event, what: str, peers: Iterable[int], detail: Callable[[], str] | None = None
    ) -> None:
        """Wait until this rank's GPU has come to an event. Arguments and errors as for `wait_until`."""

        def ready(block_s: float) -> bool:
            deadline = time.perf_counter() + block_s
            while not event.query():
                if time.perf_counter() >= deadline:
                    self.records.ask_device()
                    return False
                time.sleep(1e-4)
            return True

        self.wait_until(ready, what, peers, detail)

    def await_device(self, what: str, peers: Iterable[int]) -> None:
        """Wait until all work that is queued on the current stream of this rank's GPU is done; on a CPU it is.

        To be called before the host asks the GPU for a value, if messages of peers may be queued before it: nobody
        watches that call, so this rank would count as silent in it and would not end if a peer did.

        Arguments and errors as for `wait_until`.
        """
        if self.accelerator is not None:
            self.await_event(self.accelerator.mark(), what, peers)

    def collectively(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that uses collectives of `stage_group`, in a thread of their own, and return its result.

        On a GPU such a call may compute or wait, and nothing tells which, so this rank counts as working meanwhile, but
        not while the call waits in `wait_until`, nor for longer than `LEAST_LIMIT_S` and `LIMIT_FACTOR` allow.

        Args:
            what: what is waited for, for messages.

        Raises:
            PeerFailure: as for `wait_until`, or a connection was lost.
            Exception: whatever else `call` raises.
        """
        if self._collective is not None and self._collective.ident == threading.get_ident():
            return call()  # inside such a call
        if self._collective is None:
            self._collective = Worker("collectives")
            if self._heartbeat is not None:
                self._heartbeat.also_computes(self._collective.ident)
            if self.accelerator is not None:
                self._collective.submit(self.accelerator.enter_thread)

        def finished() -> T:
            result = call()
            if self.accelerator is not None:
                self.accelerator.synchronize()
            return result

        began_s, waits_outside = self._now_s(), 0 if self._watcher is None else self._watcher.num_waits
        limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * self._longest_call_s)
        job = self._collective.submit(finished)

        def may_compute() -> bool:
            if self.accelerator is None or self._now_s() - began_s > limit_s:
                return False
            return self._watcher is None or self._watcher.num_waits <= waits_outside + 1  # this one alone

        def ready(block_s: float) -> bool:
            with self.busy() if may_compute() else nullcontext():
                return job.done.wait(block_s)

        self.wait_until(ready, what, range(self.size))
        if job.error is None:
            self._longest_call_s = max(self._longest_call_s, self._now_s() - began_s)
            return job.result
        if isinstance(job.error, dist.DistError) or "gloo" in str(job.error).lower():
            raise self.lost_connection(what) from job.error
        raise job.error

    @staticmethod
    def _now_s() -> float:
        return time.monotonic()

    def gather_in_stage(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks of this stage, by share, on each of them. They all call this."""
        if self.num_shares == 1:
            return [value]
        group = self.stage_group()
        self._num_in_stage += 1
        about = f"object {self._num_in_stage} of stage {self.stage}"
        return self.collectively(what, lambda: gather_objects(value, group, self.seal, about, self.stage_device))

    def close(self) -> None:
        """Leave the job after a barrier. Every rank calls this at the end of a job without errors."""
        if self.size == 1 or not dist.is_initialized():
            return
        self.barrier("the end")
        for thread in (self._watcher, self._heartbeat, self._worker):
            if thread is not None:
                thread.close()
        if self._collective is not None:
            self._collective.close()
        if self.copying is not None:
            self.copying.close()
        self._destroy_graphs()
        dist.destroy_process_group()

    def _destroy_graphs(self) -> None:
        """Destroy graphs, which may hold operations of NCCL.

        NCCL waits for that before it destroys or aborts a communicator ("Process Hang" in NVIDIA's "CUDA Graph Best
        Practice for PyTorch"), and after an error the traceback holds them.
        """
        if self.accelerator is not None:
            self.accelerator.enter_thread()
            self.accelerator.graphs.destroy()

    def leave_store(self) -> None:
        """Leave what the ranks of one host have met in, before this process ends without Python's own end."""
        if isinstance(self._store, LocalStore):
            self._store.leave()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def abort(self) -> None:
        """End all that this rank's GPU does after an error: it may wait for a peer for ever, and this process with it.

        Graphs and communicators may wait for each other: destroying a graph that runs may need the abort of the
        communicator on which it waits, so neither is waited for in this thread, nor for more than `ABORT_S` seconds.
        """
        if self.copying is not None:
            self.copying.close()
        ends = time.monotonic() + ABORT_S
        graphs = Worker("graphs").submit(self._destroy_graphs)
        graphs.done.wait(ABORT_S / 2)
        for job in [Worker("abort").submit(each.abort) for each in self._communicators]:  # one may block another
            job.done.wait(max(0.0, ends - time.monotonic()))
        graphs.done.wait(max(0.0, ends - time.monotonic()))
