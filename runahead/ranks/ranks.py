"""The ranks of a job. No other module creates or destroys process groups.

Control messages always go over Gloo, also where NCCL carries KV.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from runahead.config import Backend, Device, RanksOptions
from runahead.failures import PeerFailure, SharedError, first_line
from runahead.ranks.accelerator import Communicator, accelerator_for, link_ctas, prepare_environment
from runahead.ranks.agreement import library_facts
from runahead.ranks.control_messages import ControlMessages
from runahead.ranks.devices import (
    check_own_gpus,
    choose_backend,
    choose_device,
    default_threads,
    gpu_name,
    keep_freed_memory,
)
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.mapped.memory import HostMemory, Segment, SharedBytes, Unmapped, map_other
from runahead.ranks.mapped.queues import Copying, DeviceCopying, HostCopying
from runahead.ranks.rendezvous import meet
from runahead.ranks.transfer_records import TransferRecords
from runahead.ranks.watcher import Watcher
from runahead.ranks.worker import Worker

__all__ = ["PeerFailure", "Ranks", "SharedError"]

T = TypeVar("T")

NEVER = timedelta(days=20)
"""Timeout of the process groups: never, since runahead/ranks/watcher.py decides when a peer will not come."""

ABORT_S = 5.0
"""Seconds that a rank spends at most on ending its NCCL operations after an error."""

MEETING_S = 120.0
"""Least number of seconds to wait for all ranks at the rendezvous; processes of one job may start far apart."""


class Ranks(ControlMessages):
    """This process as one rank of a job. A single rank needs no launcher and no process group.

    Attributes:
        rank, size: number of this rank, and of ranks.
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
        super().__init__(rank, size, timeout_s)
        self.device, self.backend, self.accelerator = device, backend, accelerator_for(device)
        self.local_size = size if local_size is None else local_size
        self.records = TransferRecords()
        self._links: dict[tuple[tuple[int, int], int], Communicator] = {}
        """Communicators by link and number of CTAs."""
        self._between_all: Communicator | None = None
        self.copying: Copying | None = None
        self.mapped_links: set[tuple[int, int]] = set()
        self.unmapped: str | None = None
        self._is_mapped = False
        self._collective: Worker | None = None
        if size == 1:
            return
        patience_s = max(timeout_s, MEETING_S)
        try:
            if store is None:
                store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience_s)))
            facts = library_facts() | {"the backend": backend}
            # Made before the ranks meet, so that its first beat is in the store when another rank reads it.
            self._heartbeat = Heartbeat(store, rank, size, counts_processor_time=device.type == "cpu")
            self.present = meet(store, rank, size, facts, patience_s=patience_s)
        except SharedError:
            raise
        except RuntimeError as error:  # DistNetworkError, DistStoreError: no rendezvous
            raise ValueError(f"cannot meet the other ranks: {first_line(error)}") from error
        self._worker = Worker("control")
        self._watcher = Watcher(self._heartbeat, rank, timeout_s)
        self._heartbeat.start(self.present)
        self._watcher.start()
        self.control("the connections between all ranks", partial(self._connect, store))

    def _connect(self, store: dist.Store) -> None:
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

        Raises:
            ValueError: ranks share a GPU, CUDA is asked for but not available, NCCL is asked for without CUDA, an
                environment variable would make them wait for each other for ever, or the ranks cannot meet.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        may_use_nccl = options.backend is not Backend.gloo and options.device is not Device.cpu
        if size > 1 and may_use_nccl and torch.backends.cuda.is_built():
            for sentence in prepare_environment():
                warnings.warn(sentence, stacklevel=2)
        device = choose_device(options.device, local_rank, local_size)
        backend = choose_backend(options.backend, device)
        torch.set_num_threads(options.threads or default_threads(local_size))
        if device.type == "cpu":
            keep_freed_memory()
        ranks = cls(
            rank, size, device=device, backend=backend, timeout_s=options.timeout_s, local_size=local_size, store=store
        )
        gpus = ranks.gather(gpu_name(device), "the GPUs")
        ranks.on_rank_0("the GPUs", lambda: check_own_gpus(gpus))
        return ranks

    # Groups for KV.

    @property
    def kv_group(self) -> dist.ProcessGroup:
        """Gloo group that carries KV between CPUs, or between GPUs by way of host memory."""
        return self._kv_group

    def nccl_links(self, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Communicator]:
        """NCCL communicators of directed links (from rank, to rank). All ranks call it with the same links.

        Operations of one communicator run one after the other, so links that must not wait for each other need
        communicators of their own. New ones are warmed up with one message.

        Raises:
            ValueError: the links would take too much of a GPU.
        """
        assert self.accelerator is not None, self.device
        links, made = list(links), {}
        num_ctas = link_ctas(links, self.accelerator.num_multiprocessors, self.accelerator.num_queues)
        for link in links:
            if (link, num_ctas) not in self._links:
                with self._stuck_in(f"the NCCL link from rank {link[0]} to rank {link[1]}"):
                    communicator = self.accelerator.communicator(link, NEVER, num_ctas)
                    self._links[link, num_ctas] = communicator
                    if self.rank in link:
                        token = torch.zeros(1, device=self.device)
                        sends, peer = self.rank == link[0], sum(link) - self.rank
                        (communicator.isend if sends else communicator.irecv)(token, peer).wait()
                        self.accelerator.synchronize()
            made[link] = self._links[link, num_ctas]
        return made

    def nccl_between_all(self) -> Communicator:
        """NCCL communicator of all ranks with all pairs connected, made on first use. Every rank calls this."""
        assert self.accelerator is not None, self.device
        if self._between_all is None:
            with self._stuck_in("the NCCL connections between all ranks"):
                communicator = self.accelerator.communicator(None, NEVER)
                token = torch.zeros(self.size, device=self.device)
                peers = [peer for peer in range(self.size) if peer != self.rank]
                own = token[self.rank : self.rank + 1]
                received, sent = [(token[peer : peer + 1], peer) for peer in peers], [(own, peer) for peer in peers]
                for work in communicator.exchange(received, sent):
                    work.wait()
                self.accelerator.synchronize()
                self._between_all = communicator
        return self._between_all

    def map_memory(self) -> bool:
        """Map memory between the ranks of each host, unless that was done before. Every rank calls this.

        Returns:
            whether two ranks anywhere have; the same on all ranks. Then each rank has `copying`.
        """
        if self._is_mapped or self.size == 1:
            return self.copying is not None
        self._is_mapped = True
        num_bytes, own, reason = Segment.num_bytes(self.size), None, None
        try:
            own = SharedBytes(num_bytes)
        except Unmapped as error:
            reason = str(error)
        segments = {self.rank: Segment(mmap.mmap(-1, num_bytes) if own is None else own.memory, self.size)}
        descriptors = self.gather(None if own is None else own.descriptor, "the memory that ranks share")
        beside = [each.rank for each in self.present if self._is_beside(each.rank)]
        for peer, descriptor in enumerate(descriptors):
            if own is not None and descriptor is not None and peer in beside:
                try:
                    segments[peer] = Segment(map_other(self.present[peer].pid, int(descriptor), num_bytes), self.size)
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

    def _copying_between(self, segments: dict[int, Segment]) -> Copying:
        pids = [presence.pid for presence in self.present]
        if self.accelerator is None:
            return HostCopying(HostMemory(self.rank, segments, pids), self._kv_group)
        return DeviceCopying(self.accelerator, DeviceMemory(self.rank, segments, pids, self.device))

    def _is_beside(self, peer: int) -> bool:
        return peer != self.rank and self.present[peer].is_beside(self.present[self.rank])

    @contextmanager
    def _stuck_in(self, what: str) -> Iterator[None]:
        """Context manager for calls that block the main thread until all ranks have made them."""
        if self._watcher is None:
            yield
            return
        with self._watcher.waiting(what, range(self.size)):
            yield

    def collective_group(self) -> dist.ProcessGroup:
        """Group of all ranks for collectives, which also carries KV. Every rank calls this."""
        return self.nccl_between_all().group if self.backend == "nccl" else self._kv_group

    def collectively(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that uses collectives of `collective_group`, in a thread of their own, and return its result.

        On a GPU such a call may compute or wait, and nothing tells which, so this rank counts as working meanwhile.

        Args:
            what: what is waited for, for messages.

        Raises:
            PeerFailure: as for `wait_until`, or a connection was lost.
            Exception: whatever else `call` raises.
        """
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

        job = self._collective.submit(finished)

        def ready(block_s: float) -> bool:
            with nullcontext() if self.accelerator is None else self.busy():
                return job.done.wait(block_s)

        self.wait_until(ready, what, range(self.size))
        if job.error is None:
            return job.result
        if isinstance(job.error, dist.DistError) or "gloo" in str(job.error).lower():
            raise self.lost_connection(what) from job.error
        raise job.error

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
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def abort(self) -> None:
        """End all NCCL operations after an error, so that this process can end: they may wait for a peer for ever."""
        if self.copying is not None:
            self.copying.close()
        communicators = [each for (link, _), each in self._links.items() if self.rank in link]
        communicators += [self._between_all] if self._between_all is not None else []
        jobs = [Worker("abort").submit(each.abort) for each in communicators]  # one may block another
        deadline = time.monotonic() + ABORT_S
        for job in jobs:
            job.done.wait(max(0.0, deadline - time.monotonic()))
