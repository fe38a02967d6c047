"""Schedule of KV messages along a chain of ranks. Both ends derive it from the same partition, so no shapes are sent.

KV-Runahead sends along one directed chain, never back. With `relay`, as in the paper, rank i passes the whole prefix
on to rank i + 1, here chunk by chunk, its own chunk first. With `direct` each chunk goes straight to every later rank.

Keys and values that the last stage has stored of the prompts come before token 0 and are no rank's chunk. The last
stage sends them to the first one, which passes them on like a chunk, or to all others. Nothing of them is sent to it.

Chunks belong to stages. Where a stage has several ranks (`Mesh`), those with the same share form a chain of their own:
only the peers of messages and the links are ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.ranks.mesh import Mesh

STORED = -1
"""Number of the chunk of stored keys and values, which comes before all others."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Keys and values of the tokens [start, end) in one layer, sent to or received from a peer.

    Attributes:
        chunk: number of the chunk that the tokens belong to, the same on every rank; `STORED` for stored ones.
        tag: unique within one prefill.
    """

    peer: int
    layer: int
    chunk: int
    start: int
    end: int
    tag: int

    def __str__(self) -> str:
        """The tokens and the receiver of a message that is sent. Only a profile or a timeline asks for it."""
        return f"tokens {self.start}-{self.end} to rank {self.peer}"


class Schedule(ABC):
    """The messages of one rank.

    Attributes:
        mesh: stages and shares of the ranks.
        chain: the stages with work, in the order of their last tokens.
        position: place of this rank's stage in the chain.
        num_stored: tokens of the slabs, before token 0, for stored keys and values.
    """

    num_stored = 0

    def __init__(self, rank: int, chain: list[int], mesh: Mesh) -> None:
        self.mesh, self.chain, self._share = mesh, chain, mesh.share(rank)
        self.position = chain.index(mesh.stage(rank))

    @property
    def peers(self) -> list[int]:
        """The ranks with this rank's share that have work, itself among them."""
        return [self._rank(stage) for stage in self.chain]

    @property
    def is_last(self) -> bool:
        """Whether this rank receives all keys and values, and so computes the first token."""
        return self.position == len(self.chain) - 1

    @abstractmethod
    def receives(self, layer: int) -> list[Message]:
        """Messages with other ranks' keys and values of a layer, in the order in which each link sends them."""

    @abstractmethod
    def sends(self, layer: int) -> list[Message]:
        """Messages with this rank's own keys and values of a layer."""

    @abstractmethod
    def forwards(self, layer: int, chunk: int) -> list[Message]:
        """Messages that pass on a chunk which arrived."""

    def feeds(self, layer: int) -> list[Message]:
        """Messages with stored keys and values of a layer, on the rank that has them."""
        return []

    def onward(self, layer: int) -> list[tuple[list[Message], list[Message]]]:
        """Messages to pass on, in order: (received ones that must have arrived, those that are sent then)."""
        steps = [([each], self.forwards(layer, each.chunk)) for each in self.receives(layer)]
        return [(received, sent) for received, sent in steps if sent]

    def links(self) -> list[tuple[int, int]]:
        """Directed links (from rank, to rank) that the ranks use, in the same order on every rank."""
        return self.mesh.links(self._stage_links())

    @abstractmethod
    def _stage_links(self) -> list[tuple[int, int]]:
        """Directed links between stages."""

    def _rank(self, stage: int) -> int:
        """The rank of a stage with this rank's share."""
        return self.mesh.rank(stage, self._share)


class TransferSchedule(Schedule):
    """The messages of one rank of a chain.

    Args:
        partition: chunks of the stages; one with an empty chunk takes no part.
        rank: the rank.
        first_needed: (layer, start of a chunk) -> first token that this chunk attends to in that layer, -`num_stored`
            if it needs the stored ones. It never decreases with the start, so a relay always holds what the next rank
            needs.
        by_layer: chunks per layer, if deeper layers compute fewer tokens; by default those of `partition`.
        joined: pass the prefix on as one message once all of it is there, rather than chunk by chunk as it arrives.
            A relaying rank then has four messages per layer, wherever it is in the chain.
        mesh: stages and shares of the ranks; by default every rank is a stage.
        num_stored: tokens of the slabs, before token 0, for keys and values that the last stage has stored.
    """

    def __init__(
        self,
        partition: ContextPartition,
        rank: int,
        transfer: Transfer,
        first_needed: Callable[[int, int], int],
        by_layer: Sequence[ContextPartition] | None = None,
        *,
        joined: bool = False,
        mesh: Mesh | None = None,
        num_stored: int = 0,
    ) -> None:
        super().__init__(rank, partition.chain, mesh or Mesh(partition.num_ranks))
        self.transfer, self._joined = transfer, joined and transfer is Transfer.relay
        self._partition, self._first_needed, self._by_layer = partition, first_needed, by_layer
        self.num_stored = num_stored

    def receives(self, layer: int) -> list[Message]:
        """Messages with the prefix, the nearest chunk first."""
        nearest = self.position - 1
        if self._joined and nearest >= 0:
            own = self._messages(layer, [(nearest, nearest, self.position)])
            return own + self._prefix(layer, nearest, self.position, peer=nearest)
        nearest_first = range(nearest, STORED - 1, -1)
        return self._messages(layer, [(self._source(index), index, self.position) for index in nearest_first])

    def sends(self, layer: int) -> list[Message]:
        """Messages with the own chunk."""
        return self._messages(layer, [(target, self.position, target) for target in self._targets()])

    def feeds(self, layer: int) -> list[Message]:
        if not self.is_last:
            return []
        others = range(self.position if self.transfer is Transfer.direct else min(1, self.position))
        return self._messages(layer, [(target, STORED, target) for target in others])

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        if self.transfer is Transfer.direct or self.is_last:
            return []
        return self._messages(layer, [(self.position + 1, chunk, self.position + 1)])

    def onward(self, layer: int) -> list[tuple[list[Message], list[Message]]]:
        if not self._joined or self.is_last:
            return super().onward(layer)
        sent = self._prefix(layer, self.position, self.position + 1, peer=self.position + 1)
        return [(self.receives(layer), sent)] if sent else []

    def _stage_links(self) -> list[tuple[int, int]]:
        return chain_links(self._partition, self.transfer, has_stored=self.num_stored > 0)

    def layer_skew(self) -> int:
        """Most layers by which a sender runs ahead of this rank, at least 1."""
        return max(1, self.position) if self.transfer is Transfer.direct else 1

    def _source(self, chunk: int) -> int:
        if chunk == STORED and (self.transfer is Transfer.direct or self.position == 0):
            return len(self.chain) - 1
        return chunk if self.transfer is Transfer.direct else self.position - 1

    def _targets(self) -> range:
        first, size = self.position + 1, len(self.chain)
        return range(first, size if self.transfer is Transfer.direct else min(first + 1, size))

    def _messages(self, layer: int, routes: list[tuple[int, int, int]]) -> list[Message]:
        """Messages for (peer, index of the chunk, receiver), all as positions in the chain; empty ones are left out."""
        chunks = [(peer, index, self._chunk(layer, index), receiver) for peer, index, receiver in routes]
        return [each for chunk in chunks for each in self._message(layer, *chunk)]

    def _prefix(self, layer: int, sender: int, receiver: int, *, peer: int) -> list[Message]:
        """The message with what `receiver` needs of the tokens before the chunk of `sender`, if there are any."""
        before = range(-self.num_stored, self._chunk(layer, sender).start)
        return self._message(layer, peer, sender - 1, before, receiver)

    def _message(self, layer: int, peer: int, index: int, tokens: range, receiver: int) -> list[Message]:
        start = max(tokens.start, self._first_needed(layer, self._chunk(layer, receiver).start))
        if start >= tokens.stop:
            return []
        tag, rank = layer * (len(self.chain) + 1) + index - STORED, self._rank(self.chain[peer])
        return [Message(peer=rank, layer=layer, chunk=index, start=start, end=tokens.stop, tag=tag)]

    def _chunk(self, layer: int, index: int) -> range:
        if index == STORED:
            return range(-self.num_stored, 0)
        partition = self._partition if self._by_layer is None else self._by_layer[layer]
        return partition.chunk(self.chain[index])


def chain_links(partition: ContextPartition, transfer: Transfer, *, has_stored: bool = False) -> list[tuple[int, int]]:
    """Directed links (from stage, to stage) that a prefill uses, in the same order on every rank.

    Args:
        has_stored: the last stage sends stored keys and values to others.
    """
    chain = partition.chain
    reach = 1 if transfer is Transfer.relay else len(chain)
    links = [(sender, receiver) for at, sender in enumerate(chain) for receiver in chain[at + 1 : at + 1 + reach]]
    return links + [(chain[-1], receiver) for receiver in chain[:-1][:reach] if has_stored]
