"""What travels between the ranks of a chain in every layer, from the schedule that the ranks themselves follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from partitioner.cluster import Cluster
from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import TransferSchedule


@dataclass(kw_only=True)
class Routes:
    """One entry per route, that is per message of a layer; ranks are positions in the chain.

    The routes to a receiver are consecutive, in the order in which it looks at what arrives.

    Attributes:
        busy_s, latency_s: for how long a message occupies a wire, and how much later it lands.
        wire: number of the wire on which it leaves.
        port: number of the port, shared by the receiver's links, at which it arrives; -1 without one.
        span: tokens (start, end) that it carries.
        onward: route by which the receiver passes it on; -1 if it does not.
        first: per rank, its first route as a receiver, and the number of routes behind the last rank.
        own: per rank, the routes that carry its own chunk.
        depth: per rank, layers whose K,V it has room for.
        sent_bytes: per rank, in one layer.
    """

    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    port: list[int] = field(default_factory=list)
    span: list[tuple[int, int]] = field(default_factory=list)
    onward: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    own: list[list[int]] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    num_wires: int = 0

    def __len__(self) -> int:
        return len(self.receiver)


def routes_of(partition: ContextPartition, cluster: Cluster) -> Routes:
    """The routes of a partition's chain. Every layer has the same: no layer has a sliding window."""
    chain = partition.chain
    place = {rank: position for position, rank in enumerate(chain)}
    routes = Routes(own=[[] for _ in chain], sent_bytes=[0.0] * len(chain))
    wires: dict[tuple[int, int], int] = {}
    arriving: dict[tuple[int, int], int] = {}
    for i, rank in enumerate(chain):
        schedule = TransferSchedule(partition, rank, cluster.transfer, lambda layer, start: 0)
        routes.depth.append(cluster.layers_in_flight + schedule.skew() - 1)
        routes.first.append(len(routes))
        for message in schedule.receives(0):
            k = place[message.peer]
            link = None if cluster.links is None else cluster.links.between(message.peer, rank)
            shared = link is not None and link.shared
            num_bytes = (message.end - message.start) * cluster.kv_bytes_per_token
            arriving[message.piece, i] = len(routes)
            if message.piece == k:
                routes.own[k].append(len(routes))
            routes.sender.append(k)
            routes.receiver.append(i)
            routes.busy_s.append(0.0 if link is None else num_bytes / link.bandwidth_Bps)
            routes.latency_s.append(0.0 if link is None else link.latency_s)
            routes.wire.append(wires.setdefault((k, -1) if shared else (k, i), len(wires)))
            routes.port.append(wires.setdefault((-1, i), len(wires)) if shared else -1)
            routes.span.append((message.start, message.end))
            routes.sent_bytes[k] += num_bytes
    routes.first.append(len(routes))
    routes.onward = [-1] * len(routes)
    if cluster.transfer is Transfer.relay:
        for (piece, i), route in arriving.items():
            routes.onward[route] = arriving.get((piece, i + 1), -1)
    routes.num_wires = len(wires)
    return routes
