"""Routes: the messages between the ranks of a chain in every layer, from the schedule that the ranks follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from partitioner.cost.link import Links
from partitioner.simulation.cluster import Cluster
from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import TransferSchedule


@dataclass(kw_only=True)
class Routes:
    """The messages of one layer as parallel lists with an entry per route; ranks are positions in the chain.

    The routes to a receiver are consecutive, in the order in which it takes messages. They do not depend on the lengths
    of chunks, so all partitions of one chain share them.

    Attributes:
        chunk: rank whose chunk the message holds.
        bandwidth_Bps, latency_s: of the link.
        wire: number of the wire on which the message leaves.
        port: number of the port, shared by the receiver's links, at which it arrives; -1 without one.
        onward: route by which the receiver passes it on; -1 if it does not.
        first: per rank, its first route as a receiver; the last entry is the number of routes.
        own: per rank, the routes with its own chunk.
        layer_skew: per rank, most layers by which a sender runs ahead of it.
    """

    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    bandwidth_Bps: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    port: list[int] = field(default_factory=list)
    onward: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    own: list[list[int]] = field(default_factory=list)
    layer_skew: list[int] = field(default_factory=list)
    num_wires: int = 0

    def __len__(self) -> int:
        return len(self.receiver)


def routes_of(partition: ContextPartition, cluster: Cluster) -> Routes:
    """The routes of a partition's chain, the same for every layer, since no layer has a sliding window."""
    return _routes(tuple(partition.chain), cluster.transfer, cluster.links)


@lru_cache(maxsize=1024)
def _routes(chain: tuple[int, ...], transfer: Transfer, links: Links | None) -> Routes:
    """Make the routes of a chain; cached, since a search uses the same few chains again and again."""
    ends = (sum(rank < end for rank in chain) for end in range(chain[-1] + 2))
    one_token_each = ContextPartition(boundaries=tuple(ends))
    place = {rank: position for position, rank in enumerate(chain)}
    routes = Routes(own=[[] for _ in chain])
    wires: dict[tuple[int, int], int] = {}
    arriving: dict[tuple[int, int], int] = {}
    for i, rank in enumerate(chain):
        schedule = TransferSchedule(one_token_each, rank, transfer, lambda layer, start: 0)
        routes.layer_skew.append(schedule.layer_skew())
        routes.first.append(len(routes))
        for message in schedule.receives(0):
            k = place[message.peer]
            link = None if links is None else links.between(message.peer, rank)
            shared = link is not None and link.shared
            arriving[message.chunk, i] = len(routes)
            if message.chunk == k:
                routes.own[k].append(len(routes))
            routes.sender.append(k)
            routes.chunk.append(message.chunk)
            routes.bandwidth_Bps.append(inf if link is None else link.bandwidth_Bps)
            routes.latency_s.append(0.0 if link is None else link.latency_s)
            routes.wire.append(wires.setdefault((k, -1) if shared else (k, i), len(wires)))
            routes.port.append(wires.setdefault((-1, i), len(wires)) if shared else -1)
            routes.receiver.append(i)
    routes.first.append(len(routes))
    routes.onward = [-1] * len(routes)
    if transfer is Transfer.relay:
        for (index, i), route in arriving.items():
            routes.onward[route] = arriving.get((index, i + 1), -1)
    routes.num_wires = len(wires)
    return routes
