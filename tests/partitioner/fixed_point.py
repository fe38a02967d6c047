"""The simulation told once more, without events: all moments at once, recomputed from each other until none changes.

Slow, and written from the runtime's side: who sends what is asked of the sender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from partitioner.cost.link import Link
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition
from runahead.kv_transfer import TransferSchedule


@dataclass(frozen=True)
class Sent:
    """A message of every layer that attends, or that holds a state; ranks are positions in the chain, `place` is its
    place in the receiver's order."""

    sender: int
    receiver: int
    chunk: int
    place: int
    num_bytes: float
    is_state: bool = False


Moments = dict[tuple[Sent, int], float]
"""(message, layer) -> seconds."""


def ttft_s(partition: ContextPartition, cluster: Cluster) -> float:
    chain, compute = partition.chain, cluster.compute
    size, layers = len(chain), range(compute.num_places)
    schedules = [TransferSchedule(partition, rank, cluster.transfer, lambda layer, start: 0) for rank in chain]
    messages = _messages(schedules, chain, cluster)
    depth = [cluster.layers_in_flight + schedule.layer_skew() - 1 for schedule in schedules]
    chunks = [partition.chunk(rank) for rank in chain]
    speed = [cluster.speed[rank] for rank in chain]

    opened = [[0.0] * len(layers) for _ in chain]
    closed = [[0.0] * len(layers) for _ in chain]
    slot = [[0.0] * len(layers) for _ in chain]
    seen: Moments = defaultdict(float)
    left: Moments = defaultdict(float)
    for _ in range(100 * len(layers) * size):
        before = (
            [list(row) for row in (*opened, *closed, *slot)],
            dict(seen),
            dict(left),
        )
        landed = _serve(messages, layers, chain, cluster, opened, slot, seen, left)
        for i in range(size):
            c, prefix = len(chunks[i]), chunks[i].start
            last_seen = 0.0
            incoming = sorted((m for m in messages if m.receiver == i), key=lambda m: m.place)
            outgoing = [m for m in messages if m.sender == i]
            for layer in layers:
                for message in incoming:
                    if message.is_state == (layer in compute.states):
                        last_seen = seen[message, layer] = max(last_seen, landed[message, layer])
                if layer >= depth[i]:
                    freed = layer - depth[i]
                    gone = [left[m, freed] for m in outgoing if m.is_state == (freed in compute.states)]
                    slot[i][layer] = max([slot[i][layer - 1], closed[i][layer - depth[i]], *gone])
                known = closed[i][layer - 1] + compute.between(c) / speed[i] if layer else compute.first(c) / speed[i]
                if layer in compute.states:  # nothing is sent before the rank has computed its part
                    began = max(known, slot[i][layer], last_seen)
                    opened[i][layer] = closed[i][layer] = began + compute.state(c, prefix) / speed[i]
                    continue
                opened[i][layer] = max(known, slot[i][layer])
                attended = max(opened[i][layer] + compute.own(c) / speed[i], last_seen)
                closed[i][layer] = attended + compute.prefix(c, prefix) / speed[i]
        if before == ([list(row) for row in (*opened, *closed, *slot)], dict(seen), dict(left)):
            return closed[-1][-1] + compute.last(len(chunks[-1])) / speed[-1]
    raise AssertionError("no fixed point")


def _messages(schedules: list[TransferSchedule], chain: list[int], cluster: Cluster) -> list[Sent]:
    messages = []
    for i, schedule in enumerate(schedules):
        theirs = [each for message in schedule.receives(0) for each in schedule.forwards(0, message.chunk)]
        for message in schedule.sends(0) + theirs:
            j = chain.index(message.peer)
            order = [received.chunk for received in schedules[j].receives(0)]
            num_bytes = (message.end - message.start) * cluster.kv_bytes_per_token
            messages.append(Sent(i, j, message.chunk, order.index(message.chunk), num_bytes))
    for i in range(len(chain) - 1 if cluster.compute.states else 0):
        messages.append(Sent(i, i + 1, i, 0, cluster.state_bytes, is_state=True))
    return messages


def _serve(
    messages: list[Sent],
    layers: range,
    chain: list[int],
    cluster: Cluster,
    opened: list[list[float]],
    slot: list[list[float]],
    seen: Moments,
    left: Moments,
) -> Moments:
    """Moment at which every message lands; `left` is brought up to date."""
    eligible: Moments = {}
    links: dict[Sent, Link | None] = {}
    for message in messages:
        i, j = message.sender, message.receiver
        links[message] = None if cluster.links is None else cluster.links.between(chain[i], chain[j])
        source = next((m for m in messages if m.receiver == i and m.chunk == message.chunk), None)
        for layer in layers:
            if message.is_state != (layer in cluster.compute.states):
                continue
            ready = opened[i][layer] if source is None else seen[source, layer]
            if source is not None and not cluster.pass_on_as_landed:
                ready = max(ready, opened[i][layer])
            eligible[message, layer] = max(ready, slot[j][layer])

    def occupy(moments: Moments, where: Callable[[Sent], object]) -> dict[tuple[Sent, int], tuple[float, float]]:
        free: dict[object, float] = defaultdict(float)
        ends = {}
        order = sorted(moments, key=lambda key: (moments[key], key[1], key[0].receiver, key[0].place))
        for message, layer in order:
            link = links[message]
            busy = 0.0 if link is None else message.num_bytes / link.bandwidth_Bps
            begin = max(moments[message, layer], free[where(message)])
            ends[message, layer] = begin, begin + busy
            free[where(message)] = begin + busy
        return ends

    def is_shared(message: Sent) -> bool:
        link = links[message]
        return link is not None and link.shared

    out = occupy(eligible, lambda m: m.sender if is_shared(m) else (m.sender, m.receiver))
    arriving = {key: begin for key, (begin, _) in out.items() if is_shared(key[0])}
    into = occupy(arriving, lambda m: m.receiver)
    landed: Moments = {}
    for (message, layer), (_, end) in out.items():
        left[message, layer] = end
        _, received = into.get((message, layer), (0.0, end))
        link = links[message]
        landed[message, layer] = received + (0.0 if link is None else link.latency_s)
    return landed
