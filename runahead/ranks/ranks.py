"""The ranks of a job. No other module creates or destroys process groups.

Control messages always go over Gloo, also where NCCL carries KV.
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
"""Timeout of the process groups: never, since runahead/ranks/watcher.py decides when a peer will not come."""

MEETING_S = 120.0
"""Least number of seconds to wait for all ranks at the rendezvous; processes of one job may start far apart."""


class Ranks(ControlMessages):
    """This process as one rank of a job. A single rank needs no launcher and no process group.

    Attributes:
        rank, size: number of this rank, and of ranks.
        local_size: number of ranks on this host.
        device: where this rank computes.
        backend: "gloo" or "nccl", which carries KV between ranks.
        timeout_s: seconds of silence after which a peer is given up.
        present: the processes of all ranks; empty for a single rank.
        records: this rank's last KV transfers.
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
            ValueError: ranks share a GPU, CUDA is asked for but not available, NCCL is asked for without CUDA, or the
                ranks cannot meet.
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

    def nccl_links(self, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
        """NCCL groups by directed link (from rank, to rank). Missing ones are made, by all ranks in the same order.

        Point-to-point operations of one NCCL group share one stream and are matched in the order of issue, so links
        that must not wait for each other need groups of their own. New groups are warmed up with one message.

        Returns:
            All groups made so far, also of other links.
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
        """NCCL group of all ranks with all pairs connected, made on first use. Every rank calls this."""
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
        """Context manager for calls that block the main thread until all ranks have made them."""
        if self._watcher is None:
            yield
            return
        with self._watcher.waiting(what, range(self.size)):
            yield

    def collective_group(self) -> dist.ProcessGroup:
        """Group of all ranks for collectives, which also carries KV. Every rank calls this."""
        return self.nccl_group() if self.backend == "nccl" else self._kv_group

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
            if self.device.type == "cuda":
                self._collective.submit(lambda: torch.cuda.set_device(self.device))  # a thread does not inherit it

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
        """Leave the job after a barrier. Every rank calls this at the end of a job without errors."""
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
