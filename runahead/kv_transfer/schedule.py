"""Who sends which K,V to whom: derived on both sides from the same split, so no shapes travel.

KV-Runahead has one directed chain, never back. `relay` is the paper's: rank i passes the whole prefix on to rank
i + 1, here piece by piece (a piece is one rank's chunk), the own chunk first. `direct` sends each chunk straight to
every later rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runahead.config import Transfer
from runahead.context import ContextPartition


@dataclass(frozen=True, kw_only=True)
class Message:
    """K,V of the tokens [start, end) of one layer, to or from a peer. `tag` is unique within one prefill."""

    peer: int
    layer: int
    chunk: int
    start: int
    end: int
    tag: int


class Schedule(ABC):
    """The messages of one rank. `chain` are the ranks with work, in the order of their last tokens."""

    chain: list[int]
    position: int

    @property
    def is_last(self) -> bool:
        """Does this rank get all K,V, and with them the first token?"""
        return self.position == len(self.chain) - 1

    @abstractmethod
    def receives(self, layer: int) -> list[Message]:
        """Messages with other ranks' K,V of a layer, in the order in which they are sent on each link."""

    @abstractmethod
    def sends(self, layer: int) -> list[Message]:
        """Messages with this rank's own K,V."""

    @abstractmethod
    def forwards(self, layer: int, chunk: int) -> list[Message]:
        """Messages that pass on a piece which arrived."""

    @abstractmethod
    def links(self) -> list[tuple[int, int]]:
        """Directed links (from rank, to rank) between all ranks."""


class TransferSchedule(Schedule):
    """The messages of one rank of the chain.

    Args:
        partition: chunks; ranks with an empty one take no part.
        rank: whose messages.
        first_needed: (layer, start of a chunk) -> first token that this chunk attends to in that layer. It never
            decreases with the start, so a relay always holds what the next rank needs.
        by_layer: the chunks of each layer, where deeper layers compute fewer tokens.
    """

    def __init__(
        self,
        partition: ContextPartition,
        rank: int,
        transfer: Transfer,
        first_needed: Callable[[int, int], int],
        by_layer: Sequence[ContextPartition] | None = None,
    ) -> None:
        self.chain = partition.chain
        self.position = self.chain.index(rank)
        self.transfer = transfer
        self._partition, self._first_needed, self._by_layer = partition, first_needed, by_layer

    def receives(self, layer: int) -> list[Message]:
        """The prefix, piece by piece."""
        nearest_first = range(self.position - 1, -1, -1)
        return self._messages(layer, [(self._source(index), index, self.position) for index in nearest_first])

    def sends(self, layer: int) -> list[Message]:
        """The own chunk."""
        return self._messages(layer, [(target, self.position, target) for target in self._targets()])

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        if self.transfer is Transfer.direct or self.is_last:
            return []
        return self._messages(layer, [(self.position + 1, chunk, self.position + 1)])

    def links(self) -> list[tuple[int, int]]:
        return chain_links(self._partition, self.transfer)

    def layer_skew(self) -> int:
        """Layers by which the earliest sender to this rank runs ahead of it, at least one."""
        return max(1, self.position) if self.transfer is Transfer.direct else 1

    def _source(self, chunk: int) -> int:
        return chunk if self.transfer is Transfer.direct else self.position - 1

    def _targets(self) -> range:
        behind = self.position + 1
        return range(behind, len(self.chain) if self.transfer is Transfer.direct else min(behind + 1, len(self.chain)))

    def _messages(self, layer: int, routes: list[tuple[int, int, int]]) -> list[Message]:
        """Messages for (peer, index of the chunk, receiver), all as positions in the chain; empty ones are left out."""
        messages = []
        partition = self._partition if self._by_layer is None else self._by_layer[layer]
        for peer, index, receiver in routes:
            chunk = partition.chunk(self.chain[index])
            start = max(chunk.start, self._first_needed(layer, partition.chunk(self.chain[receiver]).start))
            if start < chunk.stop:
                tag = layer * len(self.chain) + index
                at, end = self.chain[peer], chunk.stop
                messages.append(Message(peer=at, layer=layer, chunk=index, start=start, end=end, tag=tag))
        return messages


def chain_links(partition: ContextPartition, transfer: Transfer) -> list[tuple[int, int]]:
    """Directed links (from rank, to rank) that a prefill uses, in the same order on every rank."""
    chain = partition.chain
    reach = 1 if transfer is Transfer.relay else len(chain)
    return [(sender, receiver) for at, sender in enumerate(chain) for receiver in chain[at + 1 : at + 1 + reach]]
