"""K,V over NCCL: everything is queued on streams, and the host never waits.

Every directed link has a process group, hence a stream, of its own. NCCL matches the messages of a link in the order
of issue, which is the schedule's order on both sides: the sender's own chunk first, then the pieces that it passes on.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from runahead.clock import Clock
from runahead.kv_cache import KVCache
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.schedule import Message, TransferSchedule
from runahead.ranks import Ranks


class NcclTransfer(KVTransfer):
    """As `KVTransfer`, between GPUs."""

    def __init__(self, schedule: TransferSchedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int) -> None:
        super().__init__(schedule, cache, ranks, clock, depth)
        self._groups = ranks.nccl_links(schedule.links())
        self._receives: dict[int, list[tuple[Message, dist.Work]]] = {}
        self._sends: dict[int, list[dist.Work]] = {}
        self._forwarding = torch.cuda.Stream(cache.device)
        self._posting = torch.cuda.Stream(cache.device)
        self._watching = torch.cuda.Stream(cache.device)
        for layer in range(min(depth, cache.num_layers)):
            self._post_receives(layer)

    def open(self, layer: int) -> None:
        for work in self._sends.pop(layer - self.depth, []):
            work.wait()  # the compute stream waits before it writes the slot again

    def send(self, layer: int) -> None:
        works = [self._isend(message) for message in self.schedule.sends(layer)]
        with torch.cuda.stream(self._forwarding):
            for message, work in self._receives.get(layer, []):
                onward = self.schedule.forwards(layer, message.piece)
                if onward:
                    work.wait()
                    works += [self._isend(each) for each in onward]
        self._sends[layer] = works

    def await_prefix(self, layer: int) -> None:
        begin = self.clock.mark()
        for _, work in self._receives.get(layer, []):
            work.wait()
        self.log.waits.append((layer, begin, self.clock.mark()))

    def close(self, layer: int) -> None:
        if layer + self.depth < self.cache.num_layers:
            self._posting.wait_stream(torch.cuda.current_stream(self.cache.device))
            with torch.cuda.stream(self._posting):
                for work in self._sends.get(layer, []):
                    work.wait()
                self._post_receives(layer + self.depth)
        self._receives.pop(layer, None)

    def finish(self) -> None:
        for works in self._sends.values():
            for work in works:
                work.wait()
        done = torch.cuda.current_stream(self.cache.device).record_event()
        peers = {rank for link in self.schedule.links() if self.ranks.rank in link for rank in link}
        self.ranks.wait_until(lambda block_s: _queried(done, block_s), "the K,V in flight", peers)

    def _post_receives(self, layer: int) -> None:
        self._receives[layer] = []
        for message in self.schedule.receives(layer):
            part = self.part(message)
            group = self._groups[message.peer, self.ranks.rank]
            work = dist.irecv(part, message.peer, group)
            assert work is not None
            self._receives[layer].append((message, work))
            self.log.received_bytes += part.nbytes

    def _isend(self, message: Message) -> dist.Work:
        part = self.part(message)
        begin = self.clock.mark()
        work = dist.isend(part, message.peer, self._groups[self.ranks.rank, message.peer])
        assert work is not None
        with torch.cuda.stream(self._watching):
            work.wait()
            detail = f"tokens {message.start}-{message.end} to rank {message.peer}"
            self.log.sends.append((message.layer, begin, self.clock.mark(), detail))
        self.log.sent_bytes += part.nbytes
        return work


def _queried(event: torch.cuda.Event, block_s: float) -> bool:
    """Has the event happened, now or within block_s?"""
    deadline = time.perf_counter() + block_s
    while not event.query():
        if time.perf_counter() >= deadline:
            return False
        time.sleep(1e-4)
    return True
