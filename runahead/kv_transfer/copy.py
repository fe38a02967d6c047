"""KV transfer between ranks of one host by copies into the receiver's slabs, which the sender has mapped.

A message is copied once the receiver has given credit for its layer; then the sender raises the number of messages
that have arrived, for which the receiver waits. No message has a receive, and no two ranks need a communicator. On a
GPU copy engines move the bytes, and streams wait for the counters without a multiprocessor. Ranks on other hosts are
reached over the backend, in the same order and with the same counters.

Both ends count messages, layers and prefills of a link from the beginning of the job, so counters never go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Allocator
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.mapped.memory import Counts, Unmapped
from runahead.ranks.mapped.queues import At
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock


class CopyTransfer(KVTransfer):
    """`KVTransfer` by copies inside a host, and over the backend between hosts."""

    joins_prefix = True

    def __init__(
        self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int, *, record: bool = False
    ) -> None:
        super().__init__(schedule, cache, ranks, clock, depth, record=record)
        assert ranks.copying is not None
        self._copying, self._memory = ranks.copying, ranks.copying.memory
        links = [link for link in schedule.links() if ranks.rank in link]
        self._senders = [sender for sender, receiver in links if receiver == ranks.rank]
        self._receivers = [receiver for sender, receiver in links if sender == ranks.rank]
        self._peers = sorted({*self._senders, *self._receivers})
        self._arrives: dict[Message, At] = {}
        self._leaves: dict[Message, At] = {}
        self._credits = {peer: self._begin(self._memory.received, peer) for peer in self._senders}
        self._rooms = {peer: self._begin(self._memory.sent, peer) for peer in self._receivers}
        self._opened: dict[int, object] = {}
        if ranks.backend == "nccl" and (remote := self.backend_links(ranks, schedule.links())):
            self._copying.connect(ranks.nccl_links(remote))  # all ranks made them before the prefill
        for layer in range(cache.num_layers):
            for message in schedule.receives(layer):
                self._arrives[message] = self._arrival(message)
            for message in self._all_sends(layer):
                self._leaves[message] = self._departure(message)
        self._attended = self._memory.attended
        self._announce()

    @classmethod
    def allocator(cls, ranks: Ranks, schedule: Schedule) -> Allocator | None:
        assert ranks.copying is not None
        memory = ranks.copying.memory
        receives = any(receiver == ranks.rank and sender in memory.peers for sender, receiver in schedule.links())
        return memory.allocate if receives else None

    @classmethod
    def backend_links(cls, ranks: Ranks, links: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [link for link in links if link not in ranks.mapped_links]

    def open(self, layer: int) -> None:
        before = layer - self.depth
        if before >= 0:
            sends = self._all_sends(before)
            self._wait(self._leave(sends), layer, f"room for {self.schedule.name(layer)} from", "send", before, sends)
            # Keeps the host at most `depth` layers ahead of its device.
            self._watch(self._attended + before + 1, f"layer {self.schedule.number(before)}")

    def send(self, layer: int) -> None:
        for message in self.schedule.sends(layer):
            self._post(message, [])
        for received, onward in self.schedule.onward(layer):
            for message in onward:
                self._post(message, [self._arrives[each] for each in received])

    def await_prefix(self, layer: int) -> None:
        self.await_messages(layer, self.schedule.receives(layer))

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        arrivals = [self._arrives[message] for message in messages]
        self._wait(arrivals, layer, f"{self.schedule.name(layer)} from", "receive", layer, messages)

    def has_messages(self, messages: list[Message], block_s: float) -> bool:
        if self._copying.is_asynchronous:  # the device waits
            return True
        self._check()
        return self._have_reached([self._arrives[message] for message in messages], block_s)

    def close(self, layer: int) -> None:
        self._copying.after_compute(self._memory.own.attended, self._attended + layer + 1)
        following = layer + self.depth
        if following < self.cache.num_layers and self._senders:
            # The slot may be written again once it was attended to and passed on.
            credits = [self._credit(peer, following + 1) for peer in self._senders]
            self._copying.queue("credits").set(self._leave(self._all_sends(layer)), credits)
            self._note_receives(following)

    def finish(self) -> None:
        num_layers = self.cache.num_layers
        for layer in range(num_layers):
            sends, receives = self._all_sends(layer), self.schedule.receives(layer)
            self._wait(self._leave(sends), layer, f"{self.schedule.name(layer)} to leave for", "send", layer, sends)
            # Also what nobody reads, since its slots may be given to others after this.
            self.await_messages(layer, receives)
        credits = [self._credit(peer, num_layers) for peer in self._senders]
        self._wait(credits, num_layers - 1, "room from", "send", num_layers - 1, [])
        self._memory.attended = self._attended + num_layers + 1
        self._copying.after_compute(self._memory.own.attended, self._memory.attended)
        self._watch(self._memory.attended, "the KV in flight")
        for peer in self._memory.peers & set(self._receivers):
            self._memory.drop_old(peer)
        self.ranks.records.ask_device()
        self.log.received_bytes = sum(self.part(message).nbytes for message in self._arrives)

    def _await_fed(self, layer: int) -> None:
        sends = self.schedule.feeds(layer)
        what = f"{self.schedule.name(layer, 'stored ')} to leave for"
        self._wait(self._leave(sends), layer, what, "send", layer, sends)

    def _send_fed(self, messages: list[Message]) -> None:
        for message in messages:
            self._post(message, [])

    # Counters.

    def _begin(self, counts: dict[int, Counts], peer: int) -> int:
        """Count a prefill of a link, and return the layers before it."""
        count = counts.setdefault(peer, Counts())
        count.prefills += 1
        count.layers += self.cache.num_layers
        return count.layers - self.cache.num_layers

    def _arrival(self, message: Message) -> At:
        count = self._memory.received[message.peer]
        count.messages += 1
        return self._memory.own.cell("arrived", message.peer), count.messages

    def _departure(self, message: Message) -> At:
        count, peer = self._memory.sent[message.peer], message.peer
        count.messages += 1
        if peer in self._memory.peers:
            return self._memory.segment(peer).cell("arrived", self.ranks.rank), count.messages
        return self._memory.own.cell("left", peer), count.messages

    def _credit(self, sender: int, num_layers: int) -> At:
        return self._memory.own.cell("credit", sender), self._credits[sender] + num_layers

    def _leave(self, messages: list[Message]) -> list[At]:
        return [self._leaves[message] for message in messages]

    def _announce(self) -> None:
        """Tell senders where the slabs are, and give credit for the first ones."""
        beside = [peer for peer in self._senders if peer in self._memory.peers]
        if beside:
            slabs = [self.cache.layer(layer) for layer in range(self.cache.num_layers)]
            rows = [shape.bytes_per_token(self.cache.slabs.batch) for shape in self.cache.slabs.shapes]
            self._memory.describe([slab.slab_TBKX for slab in slabs], rows, [slab.first for slab in slabs])
        first = min(self.depth, self.cache.num_layers)
        for peer in self._senders:
            # A device may still be at work on the prompt before, in the same memory.
            self._copying.after_compute(*self._credit(peer, first))
        for layer in range(first):
            self._note_receives(layer)
        for peer in beside:
            self._memory.own.cell("begun", peer).set(self._memory.received[peer].prefills)
        for message, arrival in self._arrives.items():
            if message.peer not in self._memory.peers:
                queue = self._copying.queue(f"from rank {message.peer}")
                credit = self._credit(message.peer, message.layer + 1)
                queue.receive(self.part(message), message.peer, message.tag, [credit], arrival)

    # Messages.

    def _post(self, message: Message, waits: list[At]) -> None:
        part, peer, then = self.part(message), message.peer, self._leaves[message]
        record, log = self.note("send", message), self._logged(message)
        record.has_happened = partial(then[0].reached, then[1])
        self.log.sent_bytes += part.nbytes
        queue = self._copying.queue(f"to rank {peer}")
        if peer not in self._memory.peers:
            with self.sending(message):
                queue.send(part, peer, message.tag, waits, then, log)
            return
        segment = self._memory.segment(peer)
        begun = segment.cell("begun", self.ranks.rank), self._memory.sent[peer].prefills
        credit = segment.cell("credit", self.ranks.rank), self._rooms[peer] + message.layer + 1

        def place() -> tuple[object, int]:
            row_bytes = part.nbytes // part.shape[0]
            return self._open(peer), segment.layer(message.layer) + message.start * row_bytes

        if self._copying.is_asynchronous and peer not in self._opened:  # the host has to know the address now
            what = f"{self.ranks.name(peer)} to begin its prefill"
            self.ranks.wait_until(lambda block_s: self._copying.wait(*begun, block_s), what, self._peers)
        with self.sending(message):
            queue.copy(part, place, [begun, credit, *waits], then, log)

    def _open(self, peer: int) -> object:
        """The peer's slabs, which it has described."""
        if peer not in self._opened:
            try:
                self._opened[peer] = self._memory.opened(peer)
            except Unmapped as error:
                whose = self.ranks.name(peer)
                raise ValueError(f"the slabs of {whose} are out of reach: {error}; use {BACKEND}") from error
        return self._opened[peer]

    def _logged(self, message: Message) -> Callable[[object, object], None] | None:
        if not self.record:
            return None
        return lambda begin, end: self.log.sends.append((message, begin, end))

    def _note_receives(self, layer: int) -> None:
        for message in self.schedule.receives(layer):
            cell, number = self._arrives[message]
            self.note("receive", message).has_happened = partial(cell.reached, number)

    def _all_sends(self, layer: int) -> list[Message]:
        onward = [message for _, sent in self.schedule.onward(layer) for message in sent]
        return self.schedule.sends(layer) + self.schedule.feeds(layer) + onward

    # Waits.

    def _wait(
        self, ats: list[At], layer: int, what: str, direction: str, of_layer: int, messages: list[Message]
    ) -> None:
        """Let compute wait for cells. Error messages name the messages' peers; all peers of this rank can delay it."""
        if not ats:
            return
        if self._copying.is_asynchronous:
            with self.standing_still(layer):
                self._copying.computes_after(ats)
        elif not self._copying.computes_after(ats):
            peers = sorted({message.peer for message in messages}) or self._peers
            named = self.ranks.mesh.names(peers)

            def detail() -> str:
                self.ranks.records.ask_device()
                of_which = "" if of_layer == layer else f"layer {self.schedule.number(of_layer)}: "
                return of_which + self.state(direction, of_layer, messages) if messages else "nothing to be sent"

            def ready(block_s: float) -> bool:
                self._check()
                return self._have_reached(ats, block_s)

            with self.standing_still(layer):
                self.ranks.wait_until(ready, f"{what} {named}", self._peers, detail)

    def _have_reached(self, ats: list[At], block_s: float) -> bool:
        """Let the host wait for cells, for `block_s` seconds at most."""
        deadline = time.perf_counter() + block_s
        return all(self._copying.wait(*at, max(0.0, deadline - time.perf_counter())) for at in ats)

    def _watch(self, number: int, what: str) -> None:
        """Let the host wait until its device has done so many steps."""
        cell, records = self._memory.own.attended, self.ranks.records

        def ready(block_s: float) -> bool:
            if self._copying.wait(cell, number, block_s):
                return True
            records.ask_device()
            return False

        self.ranks.wait_until(ready, what, self._peers, self._oldest)

    def _check(self) -> None:
        if (error := self._copying.error) is not None:
            what = f"the KV of {self.ranks.mesh.names(self._peers)}"
            raise self.ranks.lost_connection(what) from error


BACKEND = "prefill.carrier=backend"
