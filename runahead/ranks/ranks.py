"""The ranks of a job: the only place that starts, names and ends process groups.

Control messages always go over Gloo, whatever carries the K,V.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from runahead.config import RanksOptions
from runahead.failures import PeerFailure, SharedError, first_line
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
from runahead.ranks.rendezvous import meet
from runahead.ranks.transfer_records import TransferRecords
from runahead.ranks.watcher import Watcher
from runahead.ranks.worker import Worker

__all__ = ["PeerFailure", "Ranks", "SharedError"]

T = TypeVar("T")

NEVER = timedelta(days=20)
"""Timeout of the groups themselves: see runahead/ranks/watcher.py."""

MEETING_S = 120.0
"""Seconds in which all ranks must have come, at least; processes of one job may start far apart."""


class Ranks(ControlMessages):
    """This process among the ranks of a job. One rank needs no launcher and no process group.

    Attributes:
        rank, size: place among the ranks.
        local_size: ranks of this host.
        device: where this rank computes.
        backend: "gloo" or "nccl", what carries K,V between ranks.
        timeout_s: silence after which a peer is given up.
        present: the processes of all ranks; empty if this is the only one.
        records: this rank's last transfers of K,V.
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
        self.device, self.backend = device, backend
        self.local_size = size if local_size is None else local_size
        self.records = TransferRecords()
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._nccl_group: dist.ProcessGroup | None = None
        self._collective: Worker | None = None
        if size == 1:
            return
        patience_s = max(timeout_s, MEETING_S)
        try:
            if store is None:
                store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience_s)))
            facts = library_facts() | {"the backend": backend}
            # Before the ranks have met: its first beat has to be there when another rank looks.
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
        """Join the job that torchrun (or the environment it sets) describes; without one, be the only rank.

        Raises:
            ValueError: ranks without a GPU of their own, no CUDA where it is asked for, NCCL without CUDA, or no
                rendezvous.
        """
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        device = choose_device(options.device, local_rank, local_size)
        backend = choose_backend(options.backend, device)
        torch.set_num_threads(options.threads or default_threads(local_size))
        if device.type == "cpu":
            keep_freed_memory()
        ranks = cls(
            rank,
            size,
            device=device,
            backend=backend,
            timeout_s=options.timeout_s,
            local_size=local_size,
            store=store,
        )
        gpus = ranks.gather(gpu_name(device), "the GPUs")
        ranks.on_rank_0("the GPUs", lambda: check_own_gpus(gpus))
        return ranks

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
                with self._stuck_in(f"the NCCL link from rank {link[0]} to rank {link[1]}"):
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
            with self._stuck_in("the NCCL connections between all ranks"):
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

    @contextmanager
    def _stuck_in(self, what: str) -> Iterator[None]:
        """Around calls that block the main thread itself until all ranks have made them."""
        if self._watcher is None:
            yield
            return
        with self._watcher.waiting(what, range(self.size)):
            yield

    def collective_group(self) -> dist.ProcessGroup:
        """A group of all ranks for collectives, which carries K,V at other times. Every rank calls it."""
        return self.nccl_group() if self.backend == "nccl" else self._kv_group

    def collectively(self, what: str, call: Callable[[], T]) -> T:
        """Result of a call that runs collectives of `collective_group`, in a thread of their own, watched over.

        On a GPU it cannot be told whether it computes or waits, so meanwhile this rank counts as working.

        Raises:
            PeerFailure: as in `wait_until`, or a connection was lost.
            whatever else `call` raises.
        """
        if self._collective is None:
            self._collective = Worker("collectives")
            if self._heartbeat is not None:
                self._heartbeat.also_computes(self._collective.ident)
            if self.device.type == "cuda":
                self._collective.submit(lambda: torch.cuda.set_device(self.device))  # threads do not inherit it

        def finished() -> T:
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return result

        job = self._collective.submit(finished)

        def ready(block_s: float) -> bool:
            with self.busy() if self.device.type == "cuda" else nullcontext():
                return job.done.wait(block_s)

        self.wait_until(ready, what, range(self.size))
        if job.error is None:
            return job.result
        if isinstance(job.error, dist.DistError) or "gloo" in str(job.error).lower():
            raise self.lost_connection(what) from job.error
        raise job.error

    def close(self) -> None:
        """Leave the job: every rank calls it once all went well."""
        if self.size == 1 or not dist.is_initialized():
            return
        self.barrier("the end")
        for thread in (self._watcher, self._heartbeat, self._worker):
            if thread is not None:
                thread.close()
        if self._collective is not None:
            self._collective.close()
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
