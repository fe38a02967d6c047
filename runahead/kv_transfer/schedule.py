"""Schedule of KV messages along a chain of ranks. Both ends derive it from the same partition, so no shapes are sent.

KV-Runahead sends along one directed chain, never back. With `relay`, as in the paper, rank i passes the whole prefix
on to rank i + 1, here chunk by chunk, its own chunk first. With `direct` each chunk goes straight to every later rank.

Keys and values that stages have stored of the prompts come before token 0 and are no rank's chunk. A stage sends those
that it has to the first one, which passes them on, like a chunk, to all others. Nothing of what the last stage has is
sent to it; with `direct` it sends that to all others itself.

Chunks belong to stages. Where a stage has several ranks (`Mesh`), those with the same share form a chain of their own:
only the peers of messages and the links are ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.ranks.mesh import Mesh

STORED = -1
"""Number of the chunk of what the last stage of a chain has stored; -2 is that of the stage before it, and so on."""


def stored_slots(num_stored: Mapping[int, int]) -> dict[int, range]:
    """Where stored keys and values lie before token 0: those of the last stage first, so others are one run for it.

    Args:
        num_stored: tokens of the slabs for what each stage has stored.
    """
    start, found = -sum(num_stored.values()), dict[int, range]()
    for stage in sorted(num_stored, reverse=True):
        found[stage] = range(start, start + num_stored[stage])
        start += num_stored[stage]
    return found


@dataclass(frozen=True, kw_only=True)
class Message:
    """Keys and values of the tokens [start, end) in one layer, or its state, sent to or received from a peer.

    Attributes:
        chunk: number of the chunk that the tokens belong to, the same on every rank; at most `STORED` for stored ones.
        tag: unique within one prefill.
        is_fed: it is sent from memory of its own, ahead of the sender's own layer.
        is_state: it is a state, which has no tokens: `start` and `end` are places in its slab.
    """

    peer: int
    layer: int
    chunk: int
    start: int
    end: int
    tag: int
    is_fed: bool = False
    is_state: bool = False

    def __str__(self) -> str:
        """The content and the receiver of a message that is sent. Only a profile or a timeline asks for it."""
        return f"{'state' if self.is_state else f'tokens {self.start}-{self.end}'} to rank {self.peer}"


class Schedule(ABC):
    """The messages of one rank.

    Attributes:
        mesh: stages and shares of the ranks.
        chain: the stages with work, in the order of their last tokens.
        position: place of this rank's stage in the chain.
        fed: places before token 0 of the stored keys and values that this rank sends.
        names: what the messages of each layer hold, "KV" or "state", and the layer's number in the model, for those
            who read of them; empty if it is the KV of each layer.
    """

    fed = range(0)
    names: Sequence[tuple[str, int]] = ()

    def __init__(self, rank: int, chain: list[int], mesh: Mesh) -> None:
        self.mesh, self.chain, self._share = mesh, chain, mesh.share(rank)
        self.position = chain.index(mesh.stage(rank))

    def number(self, layer: int) -> int:
        """Number in the model of a layer."""
        return self.names[layer][1] if self.names else layer

    def kind(self, layer: int) -> str:
        """Kind of a layer's messages, "KV" or "state"."""
        return self.names[layer][0] if self.names else "KV"

    def name(self, layer: int, which: str = "") -> str:
        """Name of what the messages of a layer hold, such as "the KV of layer 3", with a word of which."""
        return f"the {which}{self.kind(layer)} of layer {self.number(layer)}"

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
        first_needed: (layer, start of a chunk) -> first token that this chunk attends to in that layer, or place of the
            first stored one that is sent to it. It never decreases with the start, so a relay always holds what the
            next rank needs.
        by_layer: chunks per layer, if deeper layers compute fewer tokens; by default those of `partition`.
        joined: pass the prefix on as one message once all of it is there, rather than chunk by chunk as it arrives.
            A relaying rank then has four messages per layer, wherever it is in the chain.
        mesh: stages and shares of the ranks; by default every rank is a stage.
        num_stored: tokens of the slabs, before token 0, for the keys and values that each stage has stored.
        names: as of `Schedule`.
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
        num_stored: Mapping[int, int] = MappingProxyType({}),
        names: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(rank, partition.chain, mesh or Mesh(partition.num_ranks))
        self.transfer, self._joined = transfer, joined and transfer is Transfer.relay
        self._partition, self._first_needed, self._by_layer = partition, first_needed, by_layer
        self._slots, self.names = stored_slots(num_stored), names
        if self.position > 0:
            self.fed = self._chunk(0, self._own_stored)

    def receives(self, layer: int) -> list[Message]:
        """Messages with the prefix, the nearest chunk first."""
        nearest = self.position - 1
        if self._joined and nearest >= 0:
            own = self._messages(layer, [(nearest, nearest, self.position)])
            return own + self._prefix(layer, nearest, self.position, peer=nearest)
        stored = range(-len(self.chain) + (self.position == 0), 0) if self._slots else ()
        numbers = [*range(nearest, -1, -1), *stored]
        return self._messages(layer, [(self._source(number), number, self.position) for number in numbers])

    def sends(self, layer: int) -> list[Message]:
        """Messages with the own chunk."""
        numbers = [self.position]
        if self.position == 0 and not self._joined:
            numbers.append(self._own_stored)
        return self._messages(layer, [(target, number, target) for number in numbers for target in self._targets()])

    def feeds(self, layer: int) -> list[Message]:
        to_all = self.transfer is Transfer.direct and self.is_last
        others = range(self.position if to_all else min(1, self.position))
        routes = [(target, self._own_stored, target) for target in others]
        return [replace(each, is_fed=True) for each in self._messages(layer, routes)]

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        is_relayed = self.transfer is Transfer.relay or (self.position == 0 and chunk < STORED)
        targets = self._targets() if is_relayed else ()
        return self._messages(layer, [(target, chunk, target) for target in targets])

    def onward(self, layer: int) -> list[tuple[list[Message], list[Message]]]:
        if not self._joined or self.is_last:
            return super().onward(layer)
        sent = self._prefix(layer, self.position, self.position + 1, peer=self.position + 1)
        return [(self.receives(layer), sent)] if sent else []

    def _stage_links(self) -> list[tuple[int, int]]:
        return chain_links(self._partition, self.transfer, stored_on=list(self._slots))

    def layer_skew(self) -> int:
        """Most layers by which a sender runs ahead of this rank, at least 1."""
        return max(1, self.position) if self.transfer is Transfer.direct else 1

    def _source(self, chunk: int) -> int:
        if self.position == 0 or (self.transfer is Transfer.direct and chunk == STORED):
            return len(self.chain) + chunk
        return max(0, chunk) if self.transfer is Transfer.direct else self.position - 1

    @property
    def _own_stored(self) -> int:
        """Number of the chunk of what this rank's stage has stored."""
        return self.position - len(self.chain)

    def _targets(self) -> range:
        first, size = self.position + 1, len(self.chain)
        return range(first, size if self.transfer is Transfer.direct else min(first + 1, size))

    def _messages(self, layer: int, routes: list[tuple[int, int, int]]) -> list[Message]:
        """Messages for (peer, index of the chunk, receiver), all as positions in the chain; empty ones are left out."""
        chunks = [(peer, index, self._chunk(layer, index), receiver) for peer, index, receiver in routes]
        return [each for chunk in chunks for each in self._message(layer, *chunk)]

    def _prefix(self, layer: int, sender: int, receiver: int, *, peer: int) -> list[Message]:
        """The message with what `receiver` needs of the tokens before the chunk of `sender`, if there are any."""
        first = min((slots.start for slots in self._slots.values()), default=0)
        before = range(first, self._chunk(layer, sender).start)
        return self._message(layer, peer, sender - 1, before, receiver)

    def _message(self, layer: int, peer: int, index: int, tokens: range, receiver: int) -> list[Message]:
        start = max(tokens.start, self._first_needed(layer, self._chunk(layer, receiver).start))
        if start >= tokens.stop:
            return []
        tag, rank = (2 * layer + 1) * len(self.chain) + index, self._rank(self.chain[peer])
        is_state = self.kind(layer) == "state"
        return [Message(peer=rank, layer=layer, chunk=index, start=start, end=tokens.stop, tag=tag, is_state=is_state)]

    def _chunk(self, layer: int, index: int) -> range:
        if index < 0:
            return self._slots.get(self.chain[index], range(0))
        partition = self._partition if self._by_layer is None else self._by_layer[layer]
        return partition.chunk(self.chain[index])


def chain_links(
    partition: ContextPartition, transfer: Transfer, *, stored_on: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Directed links (from stage, to stage) that a prefill uses, in the same order on every rank.

    Args:
        stored_on: stages that send stored keys and values to others.
    """
    chain = partition.chain
    reach = 1 if transfer is Transfer.relay else len(chain)
    links = [(sender, receiver) for at, sender in enumerate(chain) for receiver in chain[at + 1 : at + 1 + reach]]
    reach_of = {**dict.fromkeys(chain, 1), chain[-1]: reach}
    return links + [
        (sender, receiver)
        for at, sender in enumerate(chain)
        if sender in stored_on
        for receiver in chain[: min(at, reach_of[sender])]
    ]
