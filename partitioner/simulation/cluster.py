"""Simulated cluster: the ranks, the links between them, and how KV are sent."""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from partitioner.cost.compute import ComputeCost
from partitioner.cost.link import Link, Links
from partitioner.cost.sparse import cost_of
from partitioner.cost.streaming import StreamingCost, Streams
from runahead.config import PrefillOptions, Transfer
from runahead.context import ContextPartition


class Steps(NamedTuple):
    """Seconds of the steps of a rank's forward, as in `ComputeCost`."""

    first: float
    between: float
    own: float
    prefix: float
    state: float
    last: float


@dataclass(kw_only=True)
class Cluster:
    """Ranks and links that a simulation runs on.

    Attributes:
        compute: compute cost of the measured device.
        speed: per rank, relative to that device; 0.5 takes twice as long.
        links: None is communication without cost, which gives the paper's practical bound TTFT(p).
        kv_bytes_per_token: bytes of the keys and values of one token in one layer, for all rows of the batch.
        state_bytes: bytes of the state of one layer that holds one, for all rows of the batch.
        layers_in_flight: as `prefill.layers_in_flight`.
        pass_on_as_landed: a chunk is passed on as soon as it has arrived, as over Gloo; otherwise after the own chunk,
            as over NCCL.
        block: chunks are this many tokens, or multiples, to which partitions are rounded.
        streams: KV heads of which ranks send the first and the last tokens alone; None: there are none.

    Raises:
        ValueError: a speed that is not above 0, links of another number of ranks, too few layers in flight.
    """

    compute: ComputeCost
    speed: list[float]
    links: Links | None
    kv_bytes_per_token: float
    transfer: Transfer = Transfer.relay
    layers_in_flight: int = 3
    pass_on_as_landed: bool = True
    state_bytes: float = 0.0
    block: int = 1
    streams: Streams | None = None

    def __post_init__(self) -> None:
        if not self.speed or any(not 0 < speed < inf for speed in self.speed):
            raise ValueError(f"search.speeds={self.speed} must be above 0, one per rank, 1 being the measured device")
        if self.links is not None and self.links.num_ranks != self.num_ranks:
            raise ValueError(f"links join {self.links.num_ranks} ranks but there are speeds for {self.num_ranks}")
        if not 0 <= self.kv_bytes_per_token < inf:
            raise ValueError(f"KV of {self.kv_bytes_per_token} bytes per token must be at least 0")
        if not 0 <= self.state_bytes < inf:
            raise ValueError(f"states of {self.state_bytes} bytes must be at least 0")
        if self.layers_in_flight < 2:
            raise ValueError(f"prefill.layers_in_flight={self.layers_in_flight} must be at least 2")

    @classmethod
    def chain(
        cls,
        compute: ComputeCost,
        num_ranks: int,
        link: Link | None,
        *,
        kv_bytes_per_token: float,
        state_bytes: float,
        prefill: PrefillOptions,
        backend: str,
        speed: Sequence[float] | None = None,
        streams: Streams | None = None,
    ) -> Cluster:
        """Make the cluster of ranks that attend and send KV as a run with these options does.

        Args:
            compute: of attention to all keys.
            link: between all ranks; None for communication without cost.
            backend: of torch.distributed.
            speed: as `speed`; all alike by default. Ranks beyond `num_ranks` are left out.
            streams: KV heads that stream.
        """
        compute = cost_of(compute, prefill)
        return cls(
            compute=compute if streams is None else StreamingCost(dense=compute, streams=streams),
            speed=list(speed or [1.0] * num_ranks)[:num_ranks],
            links=None if link is None else Links(num_ranks, link),
            kv_bytes_per_token=kv_bytes_per_token,
            state_bytes=state_bytes,
            transfer=prefill.transfer,
            layers_in_flight=prefill.layers_in_flight,
            pass_on_as_landed=backend == "gloo",
            block=prefill.block,
            streams=streams,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.speed)

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks and all links are alike."""
        return len(set(self.speed)) == 1 and (self.links is None or not self.links.overrides)

    @property
    def hands_on_states(self) -> bool:
        """Whether ranks wait for states, which each rank hands on only once it has computed its own part of them."""
        return bool(self.compute.states)

    def steps_s(self, partition: ContextPartition, rank: int) -> Steps:
        """Seconds of the steps of a rank."""
        compute, speed, chunk = self.compute, self.speed[rank], partition.chunk(rank)
        c, P = len(chunk), chunk.start
        return Steps(
            first=compute.first(c) / speed,
            between=compute.between(c) / speed,
            own=compute.own(c) / speed,
            prefix=compute.prefix(c, P) / speed,
            state=compute.state(c, P) / speed if compute.states else 0.0,
            last=compute.last(c) / speed,
        )

    def without_communication(self) -> Cluster:
        """The same ranks with communication that takes no time."""
        return replace(self, links=None)
