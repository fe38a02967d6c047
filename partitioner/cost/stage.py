"""Compute cost of a stage: of one of its shares, with the all-reduces that add the shares up.

A stage is t ranks, each with 1/t of every layer's heads and MLP. Two all-reduces per layer, after attention and after
the MLP, add up B x c x D activations; nothing overlaps them.
"""

# Legend: c chunk tokens, P prefix tokens, B batch, D model dim.

from __future__ import annotations

from dataclasses import dataclass

from partitioner.cost.collectives import allreduce_s
from partitioner.cost.compute import ComputeCost
from partitioner.cost.link import Link

ALLREDUCES = 2
"""All-reduces of a layer."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Cost of a stage of several shares, as a `ComputeCost`.

    Attributes:
        compute: of one device.
        divisor: share of that compute which one rank does, as its reciprocal: 1 if `compute` is a share's.
        num_shares: ranks of the stage.
        link: between them; None if their all-reduces take no time.
        bytes_per_token: of the activations that an all-reduce adds up, B x D numbers.
        splits_embeddings: one more all-reduce adds up the embeddings, of which every share has a part.
    """

    compute: ComputeCost
    divisor: int
    num_shares: int
    link: Link | None
    bytes_per_token: float
    splits_embeddings: bool = False

    @property
    def num_places(self) -> int:
        return self.compute.num_places

    @property
    def states(self) -> tuple[int, ...]:
        return self.compute.states

    def allreduce_s(self, c: float) -> float:
        """Seconds of one all-reduce of a chunk's activations."""
        if self.link is None:
            return 0.0
        return allreduce_s(c * self.bytes_per_token, self.num_shares, self.link)

    def first(self, c: float) -> float:
        return self.compute.first(c) / self.divisor + self.splits_embeddings * self.allreduce_s(c)

    def between(self, c: float) -> float:
        return self.compute.between(c) / self.divisor + ALLREDUCES * self.allreduce_s(c)

    def own(self, c: float) -> float:
        return self.compute.own(c) / self.divisor

    def prefix(self, c: float, P: float) -> float:
        return self.compute.prefix(c, P) / self.divisor

    def state(self, c: float, P: float) -> float:
        return self.compute.state(c, P) / self.divisor

    def last(self, c: float) -> float:
        return self.compute.last(c) / self.divisor + ALLREDUCES * self.allreduce_s(c)
