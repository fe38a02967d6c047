"""Interface of a KV transfer, as a prefill uses it with every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from runahead.cache.kv_cache import Allocator, KVCache
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
    sends: list[tuple[int, object, object, str]] = field(default_factory=list)
    """(layer, begin, end, detail) of each message sent."""


class KVTransfer(ABC):
    """Transfer of the keys and values of one prefill, on one rank.

    A prefill calls, for every layer in order: `open`, write the own keys and values to the cache, `send`,
    `await_prefix`, attend, `close`; and `finish` at the end. To attend to messages as they arrive it calls
    `await_messages` several times rather than `await_prefix`.

    Args:
        schedule: the messages of this rank.
        cache: sends read from it, and receives write to it in place.
        depth: most layers in flight. The slot of a layer is used again `depth` layers later, once its keys and values
            were attended to and have been sent.
        record: log when each message was sent, for a timeline.
    """

    joins_prefix = False
    """Whether a chain's prefix is passed on as one message; see `TransferSchedule`."""

    def __init__(
        self, schedule: Schedule, cache: KVCache, ranks: Ranks, clock: Clock, depth: int, *, record: bool = False
    ) -> None:
        self.schedule, self.cache, self.ranks, self.clock, self.depth = schedule, cache, ranks, clock, depth
        self.record = record
        self.log = TransferLog()
        self._prefill = ranks.records.begin()
        self._oldest = partial(ranks.records.oldest_outstanding, self._prefill)

    @classmethod
    def allocator(cls, ranks: Ranks, schedule: Schedule) -> Allocator | None:
        """Allocator for the slabs of a rank with this schedule; None if memory of any kind will do."""
        return None

    @classmethod
    def backend_links(cls, ranks: Ranks, links: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the directed links that need the backend."""
        return links

    @abstractmethod
    def open(self, layer: int) -> None:
        """Wait until the layer's slot may be written."""

    @abstractmethod
    def send(self, layer: int) -> None:
        """Start sending the own keys and values, which are in the cache, without waiting for them to leave."""

    @abstractmethod
    def await_prefix(self, layer: int) -> None:
        """Wait until all that is received of the layer may be read (on a GPU: by work queued from now on)."""

    def has_prefix(self, layer: int, block_s: float) -> bool:
        """Whether `await_prefix` would return at once. Blocks for `block_s` seconds at most until it would."""
        return True

    @abstractmethod
    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Wait until the content of these messages may be read (on a GPU: by work queued from now on)."""

    @abstractmethod
    def close(self, layer: int) -> None:
        """Note that the layer was attended to: its slot may be used again once its messages have left."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that this rank sends or passes on has left."""

    def note(self, direction: str, message: Message) -> TransferRecord:
        """Record a message that is being posted; `direction` is "send" or "receive"."""
        record = TransferRecord(
            direction=direction,
            peer=message.peer,
            layer=message.layer,
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
        return self.ranks.records.state(self._prefill, direction, layer, peers, num_bytes)

    def part(self, message: Message) -> Tensor:
        """The message's tokens in the cache: a contiguous view (tokens, batch, KV heads, key dim + value dim)."""
        return self.cache.layer(message.layer).tokens(message.start, message.end)
