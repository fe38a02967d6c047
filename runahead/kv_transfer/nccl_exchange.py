"""Exchange of keys and values over NCCL: each batch of messages is one operation of a communicator of all stages.

The messages of a batch are launched together, in place and of any length, on the communicator's own stream, in the
order of issue. So the steps of a ring follow each other there while the compute stream attends to earlier steps.
"""

from __future__ import annotations

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.schedule import Message
from runahead.ranks.accelerator import Event, Work
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock


class NcclExchange(KVTransfer):
    """`KVTransfer` between GPUs that all exchange their keys and values: `send` queues all messages of a layer."""

    schedule: ExchangeSchedule

    def __init__(
        self,
        schedule: ExchangeSchedule,
        cache: KVCache,
        ranks: Ranks,
        clock: Clock,
        depth: int,
        *,
        record: bool = False,
    ) -> None:
        super().__init__(schedule, cache, ranks, clock, depth, record=record)
        assert ranks.accelerator is not None, ranks.device
        self._gpu = ranks.accelerator
        self._between_stages = ranks.nccl_between_stages() if len(schedule.chain) > 1 else None
        self._works: dict[int, list[tuple[list[Message], list[Work]]]] = {}
        self._ended: dict[int, Event] = {}  # per layer in flight: the end of its attention

    def open(self, layer: int) -> None:
        # `close` made the compute stream wait for the slot's last messages, so it may be written. The wait here only
        # keeps the host at most `depth` layers ahead of the device.
        if (ended := self._ended.pop(layer - self.depth, None)) is not None:
            self._watch(ended, f"layer {self.schedule.number(layer - self.depth)}")

    def send(self, layer: int) -> None:
        self._works[layer] = []
        for received, sent in self.schedule.batches(layer):
            begin = self.clock.mark() if self.record else None
            parts = [[(self.part(each), each.peer) for each in messages] for messages in (received, sent)]
            with self.clock.ranges("send layer", self.schedule.number(layer), *sent):
                works = [] if self._between_stages is None else self._between_stages.exchange(*parts)
            self._works[layer].append((received, works))
            for way, messages in (("receive", received), ("send", sent)):
                for each in messages:
                    self.note(way, each).has_happened = works[-1].is_completed
            self.log.received_bytes += sum(part.nbytes for part, _ in parts[0])
            self.log.sent_bytes += sum(part.nbytes for part, _ in parts[1])
            if self.record:
                with self._gpu.on(self._gpu.stream("timeline")):
                    for work in works:
                        work.wait()
                    end = self.clock.mark()
                self.log.sends += [(each, begin, end) for each in sent]

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
        self._ended[layer] = self._gpu.mark()

    def finish(self) -> None:
        for layer in list(self._works):
            self.close(layer)  # also for messages that nobody reads, since their slots are freed after this
        self._watch(self._gpu.mark(), "the KV in flight")
        self.ranks.records.ask_device()

    def _await(self, layer: int, works: list[Work]) -> None:
        with self.standing_still(layer):
            for work in works:
                work.wait()

    def _watch(self, event: Event, what: str) -> None:
        self.ranks.await_event(event, what, self.schedule.peers, self._oldest)
