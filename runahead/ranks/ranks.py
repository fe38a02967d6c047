"""The ranks of a job. No module but this one and its base classes creates or destroys process groups.

Control messages always go over Gloo, also where NCCL carries KV.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from runahead.config import Backend, Device, RanksOptions
from runahead.failures import PeerFailure, SharedError, first_line
from runahead.ranks.accelerator import accelerator_for, prepare_environment
from runahead.ranks.agreement import library_facts
from runahead.ranks.devices import (
    check_own_gpus,
    choose_backend,
    choose_device,
    default_threads,
    gpu_name,
    keep_freed_memory,
)
from runahead.ranks.groups import NEVER, Groups
from runahead.ranks.heartbeat import Heartbeat
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.mapped.memory import HostMemory, Segment, SharedBytes, Unmapped, map_other
from runahead.ranks.mapped.queues import Copying, DeviceCopying, HostCopying
from runahead.ranks.mesh import Mesh
from runahead.ranks.rendezvous import environment_store, meet, store_of_job
from runahead.ranks.transfer_records import TransferRecords
from runahead.ranks.watcher import Watcher
from runahead.ranks.worker import Worker

__all__ = ["PeerFailure", "Ranks", "SharedError"]

T = TypeVar("T")

ABORT_S = 5.0
"""Seconds that a rank spends at most on ending its NCCL operations after an error."""

MEETING_S = 120.0
"""Least number of seconds to wait for all ranks at the rendezvous; processes of one job may start far apart."""


class Ranks(Groups):
    """This process as one rank of a job. A single rank needs no launcher and no process group.

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
                store = environment_store(rank, size, patience_s)
            store = store_of_job(store, rank)
            facts = library_facts() | {"the backend": backend}
            # Made before the ranks meet, so that its first beat is in the store when another rank reads it.
            on_cpu = device.type == "cpu"
            self._heartbeat = Heartbeat(store, rank, size, counts_processor_time=on_cpu, name=self.name)
            self.present = meet(store, rank, size, facts, patience_s=patience_s)
        except SharedError:
            raise
        except RuntimeError as error:  # DistNetworkError, DistStoreError: no rendezvous
            raise ValueError(f"cannot meet the other ranks: {first_line(error)}") from error
        self._worker = Worker("control")
        self._watcher = Watcher(self._heartbeat, rank, timeout_s, self.name)
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
            ValueError: the ranks make no whole stages or share a GPU, CUDA is asked for but not available, NCCL is
                asked for without CUDA, an environment variable would make them wait for each other for ever, or the
                ranks cannot meet.
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
        ranks.arrange(ranks.on_rank_0("the mesh", lambda: Mesh.of(size, options.tensor)).num_shares)
        return ranks

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

    def collectively(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that uses collectives of `stage_group`, in a thread of their own, and return its result.

        On a GPU such a call may compute or wait, and nothing tells which, so this rank counts as working meanwhile.

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

    def gather_in_stage(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks of this stage, by share, on each of them. They all call this."""
        if self.num_shares == 1:
            return [value]
        values: list[T] = [value] * self.num_shares
        group = self.stage_group()
        self.collectively(what, lambda: dist.all_gather_object(values, value, group=group))
        return values

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
        jobs = [Worker("abort").submit(each.abort) for each in self._communicators]  # one may block another
        deadline = time.monotonic() + ABORT_S
        for job in jobs:
            job.done.wait(max(0.0, deadline - time.monotonic()))
