"""Schedule of messages where all ranks exchange their keys and values in every layer, instead of along a chain.

`all_gather` sends every rank's keys and values straight to all others, in place and at once. `ring` (Liu et al., 2023,
"Ring Attention") passes them from neighbour to neighbour in p - 1 steps, each rank's own first. Both send (p - 1) C
tokens per layer. `direct` is an all-gather without the tokens that the receiver does not attend to: three quarters of
them for the 2p chunks of zigzag, fewer under a sliding window, and in the last layer only those that the rank with the
first token needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runahead.config import Exchange
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.mesh import Mesh


class ExchangeSchedule(Schedule):
    """The messages of one rank that exchanges keys and values with all others.

    Args:
        runs: per stage, its contiguous runs of tokens, in order. A stage without runs takes no part.
        rank: the rank.
        num_layers: layers of the model.
        first_needed: (layer, start of a run) -> first token that this run attends to in that layer.
        mesh: stages and shares of the ranks; by default every rank is a stage.

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
        mesh: Mesh | None = None,
    ) -> None:
        mesh = mesh or Mesh(len(runs))
        super().__init__(rank, [stage for stage, of_stage in enumerate(runs) if of_stage], mesh)
        self.exchange, self.own, self._runs = exchange, runs[mesh.stage(rank)], runs
        self._num_layers, self._first_needed = num_layers, first_needed
        self._origins = [origin for origin in self.chain for _ in runs[origin]]
        """Stage of each run. Runs are numbered in the order of stages, and `Message.chunk` is such a number."""

    def steps(self, layer: int) -> list[list[Message]]:
        """Messages received, in groups that are complete together: a group per step of a ring, otherwise one."""
        here = self.position
        origins = [self._at(here - step) for step in range(1, len(self.chain))]
        if self.exchange is Exchange.ring:
            return [self._messages(layer, self._at(here - 1), origin, self._at(here)) for origin in origins]
        groups = [self._messages(layer, origin, origin, self._at(here)) for origin in origins]
        return [[message for group in groups for message in group]]

    def batches(self, layer: int) -> list[tuple[list[Message], list[Message]]]:
        """(messages received, messages sent) of each step, for backends that start both together."""
        steps, sends = self.steps(layer), self.sends(layer)
        if self.exchange is not Exchange.ring:
            return [(received, sends) for received in steps]
        passed_on = [[onward for each in step for onward in self.forwards(layer, each.chunk)] for step in steps]
        return list(zip(steps, [sends, *passed_on], strict=False))

    def receives(self, layer: int) -> list[Message]:
        return [message for step in self.steps(layer) for message in step]

    def sends(self, layer: int) -> list[Message]:
        """Messages with the own keys and values, to the next rank first, which waits for them first."""
        own = self._at(self.position)
        reach = 1 if self.exchange is Exchange.ring else len(self.chain) - 1
        targets = [self._at(self.position + ahead) for ahead in range(1, len(self.chain))][:reach]
        return [message for target in targets for message in self._messages(layer, target, own, target)]

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        target, origin = self._at(self.position + 1), self._origins[chunk]
        if self.exchange is not Exchange.ring or origin == target:
            return []
        return [message for message in self._messages(layer, target, origin, target) if message.chunk == chunk]

    def _stage_links(self) -> list[tuple[int, int]]:
        if self.exchange is Exchange.ring:
            return [(stage, self._at(at + 1)) for at, stage in enumerate(self.chain) if len(self.chain) > 1]
        return [(sender, receiver) for sender in self.chain for receiver in self.chain if sender != receiver]

    def _at(self, position: int) -> int:
        return self.chain[position % len(self.chain)]

    def _messages(self, layer: int, peer: int, origin: int, receiver: int) -> list[Message]:
        """Messages with the runs of stage `origin` that travel to or towards `receiver`; `peer` is the other end."""
        messages = []
        for index, run in enumerate(self._runs[origin], self._origins.index(origin)):
            start = self._start(layer, run, receiver)
            if start < run.stop:
                tag = layer * len(self._origins) + index
                rank = self._rank(peer)
                messages.append(Message(peer=rank, layer=layer, chunk=index, start=start, end=run.stop, tag=tag))
        return messages

    def _start(self, layer: int, run: range, receiver: int) -> int:
        """First token of a run that is sent to the receiver; the run's end if none is."""
        if self.exchange is not Exchange.direct:
            return run.start
        readers = [each.start for each in self._runs[receiver] if each.start >= run.stop]
        if not readers or (layer == self._num_layers - 1 and receiver != self.chain[-1]):
            return run.stop
        return max(run.start, self._first_needed(layer, min(readers)))
