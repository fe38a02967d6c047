"""Payloads of a chain's transfer, in its order: a layer's keys and values, part of them, or a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from runahead.attention.sparse.heads import Heads
from runahead.attention.sparse.streaming import Streaming
from runahead.cache.quantised.wire import sent_shape
from runahead.cache.slabs import KVShape
from runahead.context import ContextPartition


class Of(Enum):
    """Tokens of which a payload holds keys and values: all, a text's first ones, or the last ones before a chunk."""

    all = "all"
    first = "first"
    last = "last"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Content of the messages of one layer of the transfer.

    Attributes:
        at: place in `Model.order`.
        kind: "kv" or "state".
        number: of the layer among those that store keys and values, or of the state.
        heads: whose keys and values it holds; None: of all heads.
        tokens: which tokens.
    """

    at: int
    kind: str
    number: int
    heads: Heads | None = None
    tokens: Of = Of.all

    def shape(self, stored: KVShape, bits: int | None) -> KVShape:
        """The shape in which keys and values travel that are stored in this one; see `sent_shape`."""
        return sent_shape(stored if self.heads is None else replace(stored, num_kv_heads=len(self.heads)), bits)

    def chunks(self, partition: ContextPartition, streaming: Streaming | None) -> ContextPartition:
        """The tokens of each chunk that it holds."""
        if self.tokens is not Of.first:
            return partition
        assert streaming is not None
        return ContextPartition(boundaries=tuple(min(end, streaming.sinks_end) for end in partition.boundaries))

    def first_needed(self, start: int, exact: int, streaming: Streaming | None) -> int:
        """First token that a chunk from `start` on needs of it.

        Args:
            start: as `chunks` has it.
            exact: what it needs of heads that see all tokens.
        """
        if self.heads is not None and not self.heads:
            return start
        if self.tokens is Of.all:
            return exact
        assert streaming is not None
        return streaming.first_needed(start) if self.tokens is Of.last else 0


def payloads_of(order: Sequence[tuple[str, int]], streaming: Streaming | None = None) -> list[Payload]:
    """The payloads of a model's layers; of those in which heads stream three each, so that layers have equally many.

    Args:
        order: as of `Model`.
    """
    found = list[Payload]()
    for at, (kind, number) in enumerate(order):
        payload = Payload(at=at, kind=kind, number=number)
        if streaming is None or kind != "kv":
            found.append(payload)
            continue
        exact, streamed = streaming.exact[number], streaming.streamed[number]
        if not streamed:  # it may have a window of its own
            none = replace(payload, heads=streamed)
            found += [payload, none, none]
            continue
        found += [
            replace(payload, heads=exact),
            *(replace(payload, heads=streamed, tokens=tokens) for tokens in (Of.first, Of.last)),
        ]
    return found
