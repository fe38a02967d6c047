"""KV transfer over NCCL: all operations are queued on streams, and the host never waits for a message.

Every directed link has a process group, and so a stream, of its own. NCCL matches the messages of a link in the order
of issue, which is the schedule's order on both sides: the sender's own chunk first, then the chunks that it passes on.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock


class NcclTransfer(KVTransfer):
    """`KVTransfer` over NCCL, between GPUs."""

    def __init__(self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int) -> None:
        super().__init__(schedule, cache, ranks, clock, depth)
        self._groups = ranks.nccl_links(())  # all ranks made this prompt's links before the prefill
        self._receives: dict[int, list[tuple[Message, dist.Work]]] = {}
        self._sends: dict[int, list[dist.Work]] = {}
        self._ended: dict[int, torch.cuda.Event] = {}  # per layer in flight: the end of its attention
        self._forwarding = torch.cuda.Stream(cache.device)
        self._posting = torch.cuda.Stream(cache.device)
        self._watching = torch.cuda.Stream(cache.device)
        self._arriving: dict[int, torch.cuda.Stream] = {}  # by peer: waits for its messages, for the records
        for layer in range(min(depth, cache.num_layers)):
            self._post_receives(layer)

    def open(self, layer: int) -> None:
        before = layer - self.depth
        begin = self.clock.mark()
        for work in self._sends.pop(before, []):
            work.wait()  # makes the compute stream wait before it writes the slot again
        self.log.waits.append((layer, begin, self.clock.mark()))
        if (ended := self._ended.pop(before, None)) is not None:
            # Keeps the host at most `depth` layers ahead of the device: a full launch queue would block it, unwatched.
            self._watch(ended, f"layer {before}")

    def send(self, layer: int) -> None:
        works = [self._isend(message) for message in self.schedule.sends(layer)]
        with torch.cuda.stream(self._forwarding):
            for message, work in self._receives.get(layer, []):
                onward = self.schedule.forwards(layer, message.chunk)
                if onward:
                    work.wait()
                    works += [self._isend(each) for each in onward]
        self._sends[layer] = works

    def await_prefix(self, layer: int) -> None:
        self.await_messages(layer, [message for message, _ in self._receives.get(layer, [])])

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        begin = self.clock.mark()
        for message, work in self._receives.get(layer, []):
            if message in messages:
                work.wait()
        self.log.waits.append((layer, begin, self.clock.mark()))

    def close(self, layer: int) -> None:
        self._ended[layer] = torch.cuda.current_stream(self.cache.device).record_event()
        if layer + self.depth < self.cache.num_layers:
            self._posting.wait_stream(torch.cuda.current_stream(self.cache.device))
            with torch.cuda.stream(self._posting):
                for work in self._sends.get(layer, []):
                    work.wait()
                self._post_receives(layer + self.depth)
        self._receives.pop(layer, None)

    def finish(self) -> None:
        unread = [work for receives in self._receives.values() for _, work in receives]
        for work in [*unread, *(work for works in self._sends.values() for work in works)]:
            work.wait()  # also for messages that nobody reads, since their slots are freed after this
        self._watch(torch.cuda.current_stream(self.cache.device).record_event(), "the KV in flight")

    def _watch(self, event: torch.cuda.Event, what: str) -> None:
        peers = {rank for link in self.schedule.links() if self.ranks.rank in link for rank in link}
        outstanding = self.ranks.records.oldest_outstanding
        self.ranks.wait_until(lambda block_s: queried(event, block_s), what, peers, outstanding)

    def _post_receives(self, layer: int) -> None:
        self._receives[layer] = []
        for message in self.schedule.receives(layer):
            part = self.part(message)
            group = self._groups[message.peer, self.ranks.rank]
            work = dist.irecv(part, message.peer, group)
            assert work is not None
            self._receives[layer].append((message, work))
            record = self.note("receive", message)
            if message.peer not in self._arriving:
                self._arriving[message.peer] = torch.cuda.Stream(self.cache.device)
            stream = self._arriving[message.peer]
            with torch.cuda.stream(stream):
                work.wait()
                record.has_happened = stream.record_event().query
            self.log.received_bytes += part.nbytes

    def _isend(self, message: Message) -> dist.Work:
        part = self.part(message)
        begin, record = self.clock.mark(), self.note("send", message)
        work = dist.isend(part, message.peer, self._groups[self.ranks.rank, message.peer])
        assert work is not None
        with torch.cuda.stream(self._watching):
            work.wait()
            detail = f"tokens {message.start}-{message.end} to rank {message.peer}"
            self.log.sends.append((message.layer, begin, self.clock.mark(), detail))
            record.has_happened = self._watching.record_event().query
        self.log.sent_bytes += part.nbytes
        return work


def queried(event: torch.cuda.Event, block_s: float) -> bool:
    """Whether the event has happened, now or within `block_s` seconds."""
    deadline = time.perf_counter() + block_s
    while not event.query():
        if time.perf_counter() >= deadline:
            return False
        time.sleep(1e-4)
    return True
