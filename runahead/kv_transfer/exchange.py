"""Who sends which K,V to whom where ranks give each other theirs in every layer, instead of along a chain.

`all_gather` sends every rank's K,V straight to all the others, in place and at once. `ring` (Liu et al., 2023) passes
them from neighbour to neighbour in p - 1 steps, each rank's own first. Both move (p - 1) C tokens per layer. `direct`
is an all-gather without what its receiver does not attend to: of 2p chunks in zigzag three quarters of that, less under
a window, and nothing in the last layer but to the rank that gets the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runahead.config import Exchange
from runahead.kv_transfer.schedule import Message, Schedule


class ExchangeSchedule(Schedule):
    """The messages of one rank.

    Args:
        runs: contiguous tokens of every rank, in order; a rank may have none and then takes no part.
        rank: whose messages.
        num_layers: layers of the model.
        first_needed: (layer, start of a run) -> first token that this run attends to in that layer.

    Attributes:
        own: this rank's runs.
    """

    def __init__(
        self,
        runs: Sequence[Sequence[range]],
        rank: int,
        exchange: Exchange,
        *,
        num_layers: int,
        first_needed: Callable[[int, int], int],
    ) -> None:
        self.chain = [each for each, of_rank in enumerate(runs) if of_rank]
        self.position = self.chain.index(rank)
        self.exchange, self.own, self._runs = exchange, runs[rank], runs
        self._num_layers, self._first_needed = num_layers, first_needed
        self._origins = [origin for origin in self.chain for _ in runs[origin]]
        """By piece: a piece is a run, and its number is the same on every rank."""

    def steps(self, layer: int) -> list[list[Message]]:
        """What is received, in groups that are there together: one group, or in a ring one per step."""
        here = self.position
        origins = [self._at(here - step) for step in range(1, len(self.chain))]
        if self.exchange is Exchange.ring:
            return [self._messages(layer, self._at(here - 1), origin, self._at(here)) for origin in origins]
        groups = [self._messages(layer, origin, origin, self._at(here)) for origin in origins]
        return [[message for group in groups for message in group]]

    def batches(self, layer: int) -> list[tuple[list[Message], list[Message]]]:
        """(received, sent) of each step, for transports that start both together."""
        steps, sends = self.steps(layer), self.sends(layer)
        if self.exchange is not Exchange.ring:
            return [(received, sends) for received in steps]
        passed_on = [[onward for each in step for onward in self.forwards(layer, each.chunk)] for step in steps]
        return list(zip(steps, [sends, *passed_on], strict=False))

    def receives(self, layer: int) -> list[Message]:
        return [message for step in self.steps(layer) for message in step]

    def sends(self, layer: int) -> list[Message]:
        """The own K,V, to the next rank first, as they are waited for there."""
        rank = self._at(self.position)
        reach = 1 if self.exchange is Exchange.ring else len(self.chain) - 1
        targets = [self._at(self.position + ahead) for ahead in range(1, len(self.chain))][:reach]
        return [message for target in targets for message in self._messages(layer, target, rank, target)]

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        target, origin = self._at(self.position + 1), self._origins[chunk]
        if self.exchange is not Exchange.ring or origin == target:
            return []
        return [message for message in self._messages(layer, target, origin, target) if message.chunk == chunk]

    def links(self) -> list[tuple[int, int]]:
        if self.exchange is Exchange.ring:
            return [(rank, self._at(at + 1)) for at, rank in enumerate(self.chain) if len(self.chain) > 1]
        return [(sender, receiver) for sender in self.chain for receiver in self.chain if sender != receiver]

    def _at(self, position: int) -> int:
        return self.chain[position % len(self.chain)]

    def _messages(self, layer: int, peer: int, origin: int, receiver: int) -> list[Message]:
        """The origin's pieces on their way to the receiver, with `peer` at the other end."""
        messages = []
        for index, run in enumerate(self._runs[origin], self._origins.index(origin)):
            start = self._start(layer, run, receiver)
            if start < run.stop:
                tag = layer * len(self._origins) + index
                messages.append(Message(peer=peer, layer=layer, chunk=index, start=start, end=run.stop, tag=tag))
        return messages

    def _start(self, layer: int, run: range, receiver: int) -> int:
        """First token of a run that travels to the receiver; the run's end if none does."""
        if self.exchange is not Exchange.direct:
            return run.start
        readers = [each.start for each in self._runs[receiver] if each.start >= run.stop]
        if not readers or (layer == self._num_layers - 1 and receiver != self.chain[-1]):
            return run.stop
        return max(run.start, self._first_needed(layer, min(readers)))
