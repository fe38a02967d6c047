"""States inside prompts: a row's states before a stop are kept beside the forward that comes by, layer by layer.

In a chain they are on the way to the last stage, which stores the prompts: a state that is kept inside a stage's chunk
is a token of the stage in the slab of its layer's state, before the one that it hands on.
"""

# Legend: B batch, Z bytes of a row's state in a layer.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from runahead.attention.states import States, StateShape
from runahead.cache.attention import LayerHook
from runahead.context import ContextPartition


class KeptStates(LayerHook):
    """Keeps the states of rows before stops, each row's in memory of its own.

    Args:
        stops: index in the padded batch -> rows whose states before it are kept.
        states: of the batch, as the forward updates them.
        shapes: of each state.

    Attributes:
        rows: (stop, row) -> of each layer a token (1, 1, Z), all in one memory.
    """

    takes_blocks = True

    def __init__(
        self, stops: Mapping[int, Sequence[int]], states: States, shapes: Sequence[StateShape], device: torch.device
    ) -> None:
        self._stops, self._states, self._device = stops, states, device
        self._sizes = [shape.num_bytes for shape in shapes]
        self.rows: dict[tuple[int, int], list[Tensor]] = {}

    def keep_state(self, number: int, stop: int) -> None:
        for row in self._stops.get(stop, ()):
            self._states.layers[number].write_row(row, self._bytes(stop, row, number))

    def put(self, stop: int, row: int, number: int, bytes_Z: Tensor) -> None:
        """Keep a copy of a state that arrived."""
        self._bytes(stop, row, number).copy_(bytes_Z)

    def _bytes(self, stop: int, row: int, number: int) -> Tensor:
        if (stop, row) not in self.rows:
            block = torch.empty(sum(self._sizes), dtype=torch.uint8, device=self._device)
            self.rows[stop, row] = [part.view(1, 1, -1) for part in block.split(self._sizes)]
        return self.rows[stop, row][number].flatten()


class KeptPlace(NamedTuple):
    """The state of a row before a stop, in a lane of a token of a slab, which has a lane for each row of the batch."""

    stop: int
    row: int
    token: int
    lane: int


@dataclass(frozen=True, kw_only=True)
class StatePlaces:
    """Where states lie in the slab of a layer's state in a chain. Every stage derives the same.

    A stage has a token for the state that it hands on, and before it as many as have room for those that are kept
    inside its chunk: one of each row of the batch.

    Attributes:
        partition: of the padded prompt.
        stops: index in the padded batch -> rows whose states before it are kept.
        batch: number of rows.
    """

    partition: ContextPartition
    stops: Mapping[int, Sequence[int]]
    batch: int

    @cached_property
    def tokens(self) -> ContextPartition:
        """Each stage's tokens; what the last one keeps inside its chunk is where it is wanted."""
        chain = self.partition.chain
        counts = [-(-len(self._kept(stage)) // self.batch) if stage in chain[:-1] else 0 for stage in self._stages]
        ends = accumulate(count + (stage in chain) for stage, count in zip(self._stages, counts, strict=True))
        return ContextPartition(boundaries=(0, *ends))

    @property
    def _stages(self) -> range:
        return range(self.partition.num_ranks)

    def handed_on(self, stage: int) -> int:
        """The token with the state that a stage hands on."""
        return self.tokens.chunk(stage).stop - 1

    def of(self, stage: int) -> list[KeptPlace]:
        """Where the states are that are kept inside the chunk of a stage which is not the last."""
        first = self.tokens.chunk(stage).start
        return [
            KeptPlace(stop, row, first + at // self.batch, at % self.batch)
            for at, (stop, row) in enumerate(self._kept(stage))
        ]

    def _kept(self, stage: int) -> list[tuple[int, int]]:
        chunk = self.partition.chunk(stage)
        inside = [stop for stop in sorted(self.stops) if chunk.start < stop <= chunk.stop]
        return [(stop, row) for stop in inside for row in self.stops[stop]]
