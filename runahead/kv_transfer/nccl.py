"""KV transfer over NCCL: all operations are queued on streams, and the host never waits for a message.

Every directed link has a communicator, and so a stream, of its own. NCCL matches the messages of a link in the order of
issue, which is the schedule's order on both sides: the sender's own chunk first, then the prefix that it passes on.
"""

from __future__ import annotations

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.accelerator import Event, Work
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock


class NcclTransfer(KVTransfer):
    """`KVTransfer` over NCCL, between GPUs."""

    joins_prefix = True

    def __init__(
        self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int, *, record: bool = False
    ) -> None:
        super().__init__(schedule, cache, ranks, clock, depth, record=record)
        assert ranks.accelerator is not None, ranks.device
        self._gpu = ranks.accelerator
        links = schedule.links()
        self._links = ranks.nccl_links(links) if links else {}  # all ranks made them before the prefill
        self._receives: dict[int, dict[Message, Work]] = {}
        self._sends: dict[int, list[Work]] = {}
        self._fed: dict[int, list[Work]] = {}
        self._ended: dict[int, Event] = {}  # per layer in flight: the end of its attention
        for layer in range(min(depth, cache.num_layers)):
            self._post_receives(layer)

    def open(self, layer: int) -> None:
        before = layer - self.depth
        if sends := self._sends.pop(before, []):
            self._wait(layer, sends)  # before the slot is written again
        if (ended := self._ended.pop(before, None)) is not None:
            # Keeps the host at most `depth` layers ahead of the device: a full launch queue would block it, unwatched.
            self._watch(ended, f"layer {self.schedule.number(before)}")

    def send(self, layer: int) -> None:
        works = [self._isend(message) for message in self.schedule.sends(layer)]
        with self._gpu.on(self._gpu.stream("passing on")):
            for received, onward in self.schedule.onward(layer):
                for message in received:
                    self._receives[layer][message].wait()
                works += [self._isend(message) for message in onward]
        self._sends[layer] = works

    def await_prefix(self, layer: int) -> None:
        self.await_messages(layer, list(self._receives.get(layer, [])))

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        if messages:
            self._wait(layer, [self._receives[layer][message] for message in messages])

    def close(self, layer: int) -> None:
        self._ended[layer] = self._gpu.mark()
        if layer + self.depth < self.cache.num_layers:
            posting = self._gpu.stream("posting receives")
            posting.wait_stream(self._gpu.current_stream())
            with self._gpu.on(posting):
                for work in self._sends.get(layer, []):
                    work.wait()
                self._post_receives(layer + self.depth)
        self._receives.pop(layer, None)

    def finish(self) -> None:
        unread = [work for receives in self._receives.values() for work in receives.values()]
        sent = [work for sends in (self._sends, self._fed) for works in sends.values() for work in works]
        for work in [*unread, *sent]:
            work.wait()  # also for messages that nobody reads, since their slots are freed after this
        self._watch(self._gpu.mark(), "the KV in flight")
        self.ranks.records.ask_device()

    def _await_fed(self, layer: int) -> None:
        self._wait(layer, self._fed.pop(layer))

    def _send_fed(self, messages: list[Message]) -> None:
        self._fed[messages[0].layer] = [self._isend(message) for message in messages]

    def _wait(self, layer: int, works: list[Work]) -> None:
        """Let compute wait for messages."""
        with self.standing_still(layer):
            for work in works:
                work.wait()

    def _watch(self, event: Event, what: str) -> None:
        peers = {rank for link in self.schedule.links() if self.ranks.rank in link for rank in link}
        self.ranks.await_event(event, what, peers, self._oldest)

    def _post_receives(self, layer: int) -> None:
        self._receives[layer] = {}
        for message in self.schedule.receives(layer):
            part = self.part(message)
            work = self._links[message.peer, self.ranks.rank].irecv(part, message.peer)
            self._receives[layer][message] = work
            self.note("receive", message).has_happened = work.is_completed
            self.log.received_bytes += part.nbytes

    def _isend(self, message: Message) -> Work:
        part, begin = self.part(message), self.clock.mark() if self.record else None
        with self.sending(message):
            work = self._links[self.ranks.rank, message.peer].isend(part, message.peer)
        self.note("send", message).has_happened = work.is_completed
        self.log.sent_bytes += part.nbytes
        if self.record:
            with self._gpu.on(self._gpu.stream("timeline")):
                work.wait()
                self.log.sends.append((message, begin, self.clock.mark()))
        return work
