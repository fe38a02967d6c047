"""Exchange of keys and values over NCCL: each batch of messages is one operation in a process group of all ranks.

The messages of a batch are launched together, in place and of any length, on the process group's own stream, in the
order of issue. So the steps of a ring follow each other there while the compute stream attends to earlier steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.nccl import queried
from runahead.kv_transfer.schedule import Message
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock


class NcclExchange(KVTransfer):
    """`KVTransfer` between GPUs that all exchange their keys and values: `send` queues all messages of a layer."""

    schedule: ExchangeSchedule

    def __init__(self, schedule: ExchangeSchedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int) -> None:
        super().__init__(schedule, cache, ranks, clock, depth)
        self._group = ranks.nccl_group() if len(schedule.chain) > 1 else None
        self._works: dict[int, list[tuple[list[Message], list[dist.Work]]]] = {}
        self._ended: dict[int, torch.cuda.Event] = {}  # per layer in flight: the end of its attention
        self._watching = torch.cuda.Stream(cache.device)

    def open(self, layer: int) -> None:
        # `close` made the compute stream wait for the slot's last messages, so it may be written. The wait here only
        # keeps the host at most `depth` layers ahead of the device.
        if (ended := self._ended.pop(layer - self.depth, None)) is not None:
            self._watch(ended, f"layer {layer - self.depth}")

    def send(self, layer: int) -> None:
        self._works[layer] = []
        for received, sent in self.schedule.batches(layer):
            begin = self.clock.mark()
            records = [self.note("receive", each) for each in received] + [self.note("send", each) for each in sent]
            operations = [dist.P2POp(dist.irecv, self.part(each), each.peer, self._group) for each in received]
            operations += [dist.P2POp(dist.isend, self.part(each), each.peer, self._group) for each in sent]
            works = dist.batch_isend_irecv(operations) if operations else []
            self._works[layer].append((received, works))
            self.log.received_bytes += sum(self.part(each).nbytes for each in received)
            self.log.sent_bytes += sum(self.part(each).nbytes for each in sent)
            with torch.cuda.stream(self._watching):
                for work in works:
                    work.wait()
                end = self.clock.mark()
                for record in records:
                    record.has_happened = self._watching.record_event().query
            for each in sent:
                detail = f"tokens {each.start}-{each.end} to rank {each.peer}"
                self.log.sends.append((layer, begin, end, detail))

    def await_prefix(self, layer: int) -> None:
        self._await(layer, [work for _, works in self._works[layer] for work in works])

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        steps = self._works[layer]
        self._await(layer, [work for received, works in steps if received == messages for work in works])

    def close(self, layer: int) -> None:
        # Waits for sends too, since the slot will be written again.
        for _, works in self._works.pop(layer):
            for work in works:
                work.wait()
        self._ended[layer] = torch.cuda.current_stream(self.cache.device).record_event()

    def finish(self) -> None:
        for layer in list(self._works):
            self.close(layer)  # also for messages that nobody reads, since their slots are freed after this
        self._watch(torch.cuda.current_stream(self.cache.device).record_event(), "the KV in flight")

    def _await(self, layer: int, works: list[dist.Work]) -> None:
        begin = self.clock.mark()
        for work in works:
            work.wait()
        self.log.waits.append((layer, begin, self.clock.mark()))

    def _watch(self, event: torch.cuda.Event, what: str) -> None:
        outstanding = self.ranks.records.oldest_outstanding
        self.ranks.wait_until(lambda block_s: queried(event, block_s), what, self.schedule.chain, outstanding)
