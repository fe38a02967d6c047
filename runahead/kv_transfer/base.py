"""Interface of a KV transfer, as a prefill uses it with every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Allocator, Slabs
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.ranks import Ranks
from runahead.ranks.transfer_records import TransferRecord
from runahead.timeline.clock import Clock


@dataclass(kw_only=True)
class TransferLog:
    """Bytes that a rank sent and received, and when; begin and end are marks of the clock."""

    sent_bytes: int = 0
    received_bytes: int = 0
    waits: list[tuple[int, object, object]] = field(default_factory=list)
    """(layer, begin, end) of each time that this rank stood still."""
    sends: list[tuple[Message, object, object]] = field(default_factory=list)
    """(message, begin, end) of each message sent."""


class KVTransfer(ABC):
    """Transfer of the keys and values of one prefill, and of its states, on one rank.

    A layer here is a payload's: what a layer of the model stores, part of it, or its state (`Schedule.names`).
    A prefill calls, for every layer in order: `open`, write the own keys and values to the cache, `send`,
    `await_prefix`, attend, `close`; and `finish` at the end. To attend to messages as they arrive it calls
    `await_messages` several times rather than `await_prefix`. A rank with stored keys and values for others calls
    `feed` for every layer in order, `lead` layers ahead.

    Args:
        schedule: the messages of this rank.
        cache: sends read from it, and receives write to it in place.
        depth: most layers in flight. The slot of a layer is used again `depth` layers later, once its keys and values
            were attended to and have been sent.
        record: log when each message was sent, for a timeline.

    Attributes:
        lead: layers by which stored keys and values are sent ahead of the own layer, since the rank that needs them
            first is ahead of this one; 0 if this rank sends none.
    """

    joins_prefix = False
    """Whether a chain's prefix is passed on as one message; see `TransferSchedule`."""

    def __init__(
        self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int, *, record: bool = False
    ) -> None:
        self.schedule, self.cache, self.ranks, self.clock, self.depth = schedule, cache, ranks, clock, depth
        self.record = record
        self.lead = depth * schedule.position if schedule.fed else 0
        self._stored = self._stored_ring(cache.slabs.device) if self.lead else None
        self.log = TransferLog()
        self._prefill = ranks.records.begin()
        self._oldest = partial(ranks.records.oldest_outstanding, self._prefill)

    @classmethod
    def allocator(cls, ranks: Ranks, schedule: Schedule) -> Allocator | None:
        """Allocator for the slabs of a rank with this schedule; None if memory of any kind will do."""
        return None

    @classmethod
    def backend_links(cls, ranks: Ranks, links: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The directed links that need the backend."""
        return links

    @property
    def fed_bytes(self) -> int:
        """Bytes allocated for stored keys and values on their way to other ranks."""
        return 0 if self._stored is None else self._stored.num_bytes

    def _stored_ring(self, device: torch.device, *, pin_memory: bool = False) -> Slabs:
        """Memory from which stored keys and values of a few layers are sent."""
        fed, layers = self.schedule.fed, range(self.cache.num_layers)
        first_messages = [next(iter(self.schedule.feeds(layer)), None) for layer in layers]
        return Slabs.empty(
            self.cache.slabs.shapes,
            batch=self.cache.slabs.batch,
            # A state takes one place, however many tokens are stored.
            spans=[(fed.start if message is None else message.start, fed.stop) for message in first_messages],
            num_slabs=self.lead + 1,
            device=device,
            pin_memory=pin_memory,
        )

    def feed(self, layer: int, fill: Callable[[Tensor], object]) -> None:
        """Start sending stored keys and values of a layer, without waiting for them to leave.

        Args:
            fill: writes them to memory (tokens, batch, KV heads, key dim + value dim) from which they are sent.
        """
        if messages := self.schedule.feeds(layer):
            assert self._stored is not None
            if (before := layer - self._stored.num_slabs) >= 0:
                self._await_fed(before)
            fill(self.part(messages[0]))
            self._send_fed(messages)

    def _await_fed(self, layer: int) -> None:  # noqa: B027 (most schedules send none)
        """Wait until the stored keys and values of a layer have left, so that their memory may be written."""

    def _send_fed(self, messages: list[Message]) -> None:
        """Start sending messages with stored keys and values, which are in their memory."""
        assert not messages, f"{type(self).__name__} is for schedules that send no stored keys and values"

    @abstractmethod
    def open(self, layer: int) -> None:
        """Wait until the layer's slot may be written."""

    @abstractmethod
    def send(self, layer: int) -> None:
        """Start sending the own keys and values, which are in the cache, without waiting for them to leave."""

    @abstractmethod
    def await_prefix(self, layer: int) -> None:
        """Wait until all that is received of the layer may be read (on a GPU: by work queued from now on)."""

    @abstractmethod
    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Wait until the content of these messages may be read (on a GPU: by work queued from now on)."""

    def has_messages(self, messages: list[Message], block_s: float) -> bool:
        """Whether waiting for these messages would return at once. Blocks for `block_s` seconds at most until then."""
        return True

    @abstractmethod
    def close(self, layer: int) -> None:
        """Note that the layer was attended to: its slot may be used again once its messages have left."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that this rank sends or passes on has left."""

    def sending(self, message: Message) -> AbstractContextManager[object]:
        """Context manager in which a message is posted that is sent: a range of a profile."""
        return self.clock.ranges("send layer", self.schedule.number(message.layer), message)

    @contextmanager
    def standing_still(self, layer: int) -> Iterator[None]:
        """Context manager in which this rank, or its device, waits for others: logged, and a range of a profile."""
        begin = self.clock.mark()
        with self.clock.ranges("wait in layer", self.schedule.number(layer)):
            yield
        self.log.waits.append((layer, begin, self.clock.mark()))

    def note(self, direction: str, message: Message) -> TransferRecord:
        """Record a message that is being posted; `direction` is "send" or "receive"."""
        record = TransferRecord(
            direction=direction,
            peer=message.peer,
            layer=self.schedule.number(message.layer),
            kind=self.schedule.kind(message.layer),
            start=message.start,
            end=message.end,
            num_bytes=self.part(message).nbytes,
            prefill=self._prefill,
        )
        return self.ranks.records.posted(record)

    def state(self, direction: str, layer: int, messages: Iterable[Message]) -> str:
        """Describe the state of messages of a layer, for an error message: bytes posted, done and not posted."""
        messages = list(messages)
        num_bytes = sum(self.part(message).nbytes for message in messages)
        peers = {message.peer for message in messages}
        number, kind = self.schedule.number(layer), self.schedule.kind(layer)
        return self.ranks.records.state(self._prefill, direction, number, peers, num_bytes, kind=kind)

    def part(self, message: Message) -> Tensor:
        """The message's tokens in the cache: a contiguous view (tokens, batch, KV heads, key dim + value dim)."""
        if message.is_fed:
            assert self._stored is not None
            return self._stored.by_layer[message.layer].tokens(message.start, message.end)
        return self.cache.tokens(message.layer, message.start, message.end)


class NoTransfer(KVTransfer):
    """Transfer of a stage that is alone in its chain: there are no messages."""

    def open(self, layer: int) -> None:
        pass

    def send(self, layer: int) -> None:
        pass

    def await_prefix(self, layer: int) -> None:
        pass

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        pass

    def close(self, layer: int) -> None:
        pass

    def finish(self) -> None:
        pass
