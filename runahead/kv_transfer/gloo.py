"""KV transfer over Gloo: three threads post receives ahead, pass chunks on as they arrive, and wait for sends.

Gloo's own threads move the bytes; the threads here only wait for them, without the interpreter's lock. A work object
must be kept and waited for: dropping it loses the message, and it never reports completion by itself. Tensors on a GPU
are staged through pinned host memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.kv_transfer.base import KVTransfer
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.accelerator import Accelerator, Event
from runahead.ranks.ranks import Ranks
from runahead.ranks.transfer_records import TransferRecord
from runahead.timeline.clock import Clock


class GlooTransfer(KVTransfer):
    """`KVTransfer` over Gloo, between CPUs or staged through host memory."""

    def __init__(
        self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int, *, record: bool = False
    ) -> None:
        super().__init__(schedule, cache, ranks, clock, depth, record=record)
        layers = range(cache.num_layers)
        self._staging = None if ranks.accelerator is None else _Staging(cache, depth, ranks.accelerator)
        self._free = [threading.Event() for _ in layers]  # the slot may be written and received into
        self._arrived = [threading.Event() for _ in layers]
        self._chunk_arrived = {
            (layer, each.chunk): threading.Event() for layer in layers for each in schedule.receives(layer)
        }
        self._closed = [threading.Event() for _ in layers]  # the layer was attended to
        self._left = [threading.Event() for _ in layers]  # all messages sent of this layer have left
        self._posted: queue.SimpleQueue[tuple[int, list[tuple[Message, Any, TransferRecord]]]] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[tuple[Message, Any, float, TransferRecord]] = queue.SimpleQueue()
        self._unsent = [len(self._all_sends(layer)) for layer in layers]
        links = [link for link in schedule.links() if ranks.rank in link]
        self._peers = sorted({rank for link in links for rank in link} - {ranks.rank})
        for layer in layers:
            if self._unsent[layer] == 0:
                self._left[layer].set()
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=body.__name__.strip("_"), daemon=True)
            for body in (self._post_receives, self._take_arrivals, self._wait_for_sends)
        ]
        for thread in self._threads:
            thread.start()

    # The main thread.

    def open(self, layer: int) -> None:
        before = max(0, layer - self.depth)
        sends = self._all_sends(before)
        self._wait(self._free[layer], layer, f"room for {self.schedule.name(layer)} from", "send", before, sends)

    def send(self, layer: int) -> None:
        for message in self.schedule.sends(layer):
            if self._staging is not None:
                self._staging.take_down(self.cache, message)
            try:
                self._isend(message)
            except _Lost as error:
                raise self.ranks.lost_connection(str(error)) from error

    def await_prefix(self, layer: int) -> None:
        self._wait_for_arrival(self._arrived[layer], layer, self.schedule.receives(layer))
        if self._staging is not None:
            self._staging.await_upload(layer)

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        for message in messages:
            self._wait_for_arrival(self._chunk_arrived[layer, message.chunk], layer, [message])
        if self._staging is not None:
            self._staging.await_upload(layer)

    def has_messages(self, messages: list[Message], block_s: float) -> bool:
        ends_s = time.perf_counter() + block_s
        arrived = (self._chunk_arrived[each.layer, each.chunk] for each in messages)
        return all(event.wait(max(0.0, ends_s - time.perf_counter())) for event in arrived)

    def close(self, layer: int) -> None:
        if self._staging is not None:
            self._staging.attended(layer)
        self._closed[layer].set()

    def finish(self) -> None:
        for layer, left in enumerate(self._left):
            what = f"{self.schedule.name(layer)} to leave for"
            self._wait(left, layer, what, "send", layer, self._all_sends(layer))
            # The last layer's prefix may not have been read, but it must have arrived before its slots are freed.
            self._wait_for_arrival(self._arrived[layer], layer, self.schedule.receives(layer))
        for thread in self._threads:
            thread.join()
        if self._staging is not None:
            self._staging.hold_compute()

    def _wait_for_arrival(self, event: threading.Event, layer: int, messages: list[Message]) -> None:
        self._wait(event, layer, f"{self.schedule.name(layer)} from", "receive", layer, messages)

    def _wait(
        self, event: threading.Event, layer: int, what: str, direction: str, of_layer: int, messages: list[Message]
    ) -> None:
        """Wait for an event. Error messages name the messages' peers; all peers of this rank can delay it."""
        if not event.is_set():
            peers = sorted({message.peer for message in messages}) or self._peers
            named = self.ranks.mesh.names(peers)

            def detail() -> str:
                if not messages:
                    return "nothing to be sent"
                of_which = "" if of_layer == layer else f"layer {self.schedule.number(of_layer)}: "
                return of_which + self.state(direction, of_layer, messages)

            with self.standing_still(layer):
                self.ranks.wait_until(lambda block_s: event.wait(block_s), f"{what} {named}", self._peers, detail)
        if isinstance(self._error, _Lost):
            raise self.ranks.lost_connection(str(self._error)) from self._error
        if self._error is not None:
            raise self._error

    def _stored_ring(self, device: torch.device, *, pin_memory: bool = False) -> Slabs:
        return super()._stored_ring(torch.device("cpu"), pin_memory=self.ranks.accelerator is not None)

    def _await_fed(self, layer: int) -> None:
        sends = self._all_sends(layer)
        what = f"{self.schedule.name(layer, 'stored ')} to leave for"
        self._wait(self._left[layer], layer, what, "send", layer, sends)

    def _send_fed(self, messages: list[Message]) -> None:
        for message in messages:
            try:
                self._isend(message)
            except _Lost as error:
                raise self.ranks.lost_connection(str(error)) from error

    # The threads.

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            if self.ranks.accelerator is not None:
                self.ranks.accelerator.enter_thread()
            body()
        except Exception as error:
            self._error = self._error or error
            for events in (self._free, self._arrived, self._closed, self._left, self._chunk_arrived.values()):
                for event in events:
                    event.set()

    def _post_receives(self) -> None:
        """Post the receives of each layer once its slot is free, up to `depth` layers ahead of the main thread."""
        for layer in range(self.cache.num_layers):
            before = layer - self.depth
            if before >= 0:
                self._closed[before].wait()
                self._left[before].wait()
                if self._staging is not None:
                    self._staging.await_reuse(before)
            if self._error is not None:
                return
            works = []
            for message in self.schedule.receives(layer):
                with self._naming("from", message):
                    part = self._host_part(message)
                    work = dist.irecv(part, message.peer, self.ranks.kv_group, message.tag)
                    works.append((message, work, self.note("receive", message)))
            self._free[layer].set()
            self._posted.put((layer, works))

    def _take_arrivals(self) -> None:
        """Wait for the chunks of the prefix one by one, and pass each on as soon as it has arrived."""
        for _ in range(self.cache.num_layers):
            layer, works = self._posted.get()
            for message, work, record in works:
                with self._naming("from", message):
                    work.wait()
                record.done()
                self.log.received_bytes += self._host_part(message).nbytes
                for onward in self.schedule.forwards(layer, message.chunk):
                    self._isend(onward)
                if self._staging is not None:
                    self._staging.bring_up(self.cache, message)
                self._chunk_arrived[layer, message.chunk].set()
            self._arrived[layer].set()

    def _wait_for_sends(self) -> None:
        for _ in range(sum(self._unsent)):
            message, work, begin_s, record = self._sending.get()
            with self._naming("to leave for", message):
                work.wait()
            record.done()
            self.log.sent_bytes += self._host_part(message).nbytes
            self.log.sends.append((message, begin_s, time.perf_counter()))
            self._unsent[message.layer] -= 1
            if self._unsent[message.layer] == 0:
                self._left[message.layer].set()

    def _isend(self, message: Message) -> None:
        begin_s = time.perf_counter()
        with self.sending(message), self._naming("to leave for", message):
            work = dist.isend(self._host_part(message), message.peer, self.ranks.kv_group, message.tag)
        self._sending.put((message, work, begin_s, self.note("send", message)))

    def _all_sends(self, layer: int) -> list[Message]:
        forwards = [self.schedule.forwards(layer, message.chunk) for message in self.schedule.receives(layer)]
        own = self.schedule.sends(layer) + self.schedule.feeds(layer)
        return own + [message for messages in forwards for message in messages]

    @contextmanager
    def _naming(self, way: str, message: Message) -> Iterator[None]:
        """Replace Gloo's errors, which name addresses and its own source lines, by one that names rank and layer."""
        try:
            yield
        except RuntimeError as error:
            raise _Lost(f"{self.schedule.name(message.layer)} {way} {self.ranks.name(message.peer)}") from error

    def _host_part(self, message: Message) -> Tensor:
        if self._staging is None or message.is_fed:
            return self.part(message)
        return self._staging.host.by_layer[message.layer].tokens(message.start, message.end)


class _Lost(RuntimeError):
    """A lost connection. The message says what was waited for."""


class _Staging:
    """Pinned host copies of the GPU's slots, since Gloo reads and writes host memory only."""

    def __init__(self, cache: KVCache, depth: int, accelerator: Accelerator) -> None:
        self.host = Slabs.empty(
            cache.slabs.shapes,
            batch=cache.slabs.batch,
            spans=[cache.extent(layer) for layer in range(cache.num_layers)],
            num_slabs=depth,
            device=torch.device("cpu"),
            pin_memory=True,
        )
        self._accelerator, self._stream = accelerator, accelerator.stream("copies from the host")
        self._uploads: dict[int, Event] = {}
        self._attended: dict[int, Event] = {}
        self._depth = depth

    def take_down(self, cache: KVCache, message: Message) -> None:
        """Copy a message to the host, and wait for the copy, since Gloo reads it at once."""
        part = cache.tokens(message.layer, message.start, message.end)
        self.host.by_layer[message.layer].tokens(message.start, message.end).copy_(part)

    def bring_up(self, cache: KVCache, message: Message) -> None:
        """Queue the copy of a message to the GPU, after the attention that last used the slot."""
        with self._accelerator.on(self._stream):
            if (before := self._attended.pop(message.layer - self._depth, None)) is not None:
                self._stream.wait_event(before)
            part = self.host.by_layer[message.layer].tokens(message.start, message.end)
            cache.tokens(message.layer, message.start, message.end).copy_(part, non_blocking=True)
            self._uploads[message.layer] = self._stream.record_event()

    def await_upload(self, layer: int) -> None:
        """Make the current stream wait for the copies of a layer to the GPU."""
        if layer in self._uploads:
            self._accelerator.current_stream().wait_event(self._uploads[layer])

    def attended(self, layer: int) -> None:
        """Note that the layer's attention is queued on the current stream."""
        self._attended[layer] = self._accelerator.mark()

    def await_reuse(self, layer: int) -> None:
        """Wait on the host until the host slot of a layer has been copied to the GPU."""
        if (upload := self._uploads.pop(layer, None)) is not None:
            upload.synchronize()

    def hold_compute(self) -> None:
        """Make the current stream wait for all copies, so that the slots may be freed."""
        self._accelerator.current_stream().wait_stream(self._stream)
