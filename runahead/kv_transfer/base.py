"""What a prefill asks of a K,V transfer, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.ranks import Ranks
from runahead.ranks.transfer_records import TransferRecord
from runahead.timeline.clock import Clock


@dataclass(kw_only=True)
class TransferLog:
    """What was moved, and when, in marks of the clock."""

    sent_bytes: int = 0
    received_bytes: int = 0
    waits: list[tuple[int, object, object]] = field(default_factory=list)
    """(layer, begin, end) of this rank's standing still."""
    sends: list[tuple[int, object, object, str]] = field(default_factory=list)
    """(layer, begin, end, detail)."""


class KVTransfer(ABC):
    """K,V of one prefill on their way. For every layer in order: open, (write own K,V), send, await_prefix, close.

    Layers in which a rank attends to what arrived piece by piece have several `await_messages` for the `await_prefix`.

    At most `depth` layers are in flight: a layer's slot is taken again only once its K,V were attended to and left.
    """

    def __init__(self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int) -> None:
        self.schedule, self.cache, self.ranks, self.clock, self.depth = schedule, cache, ranks, clock, depth
        self.log = TransferLog()
        ranks.records.begin()

    @abstractmethod
    def open(self, layer: int) -> None:
        """Return once the layer's slot may be written."""

    @abstractmethod
    def send(self, layer: int) -> None:
        """Start sending the own K,V, which are in the cache, without waiting for them to leave."""

    @abstractmethod
    def await_prefix(self, layer: int) -> None:
        """Return once all that is received of the layer may be read (on a GPU: by work queued from now on)."""

    @abstractmethod
    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Return once what these messages bring may be read."""

    @abstractmethod
    def close(self, layer: int) -> None:
        """The layer was attended to: its slot may be taken by a later one once its messages have left."""

    @abstractmethod
    def finish(self) -> None:
        """Return once everything that this rank passes on has left."""

    def note(self, direction: str, message: Message) -> TransferRecord:
        """Keep a record of a message that is being posted."""
        record = TransferRecord(
            direction=direction,
            peer=message.peer,
            layer=message.layer,
            start=message.start,
            end=message.end,
            num_bytes=self.part(message).nbytes,
        )
        return self.ranks.records.posted(record)

    def state(self, direction: str, layer: int, messages: Iterable[Message]) -> str:
        """What became of messages of a layer: bytes, posted or not."""
        messages = list(messages)
        num_bytes = sum(self.part(message).nbytes for message in messages)
        return self.ranks.records.state(direction, layer, {message.peer for message in messages}, num_bytes)

    def part(self, message: Message) -> Tensor:
        """Where a message lies in the cache."""
        return self.cache.layer(message.layer).tokens(message.start, message.end)
