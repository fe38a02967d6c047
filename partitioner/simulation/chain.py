"""Event simulation of the chain of ranks, message by message, which predicts the TTFT of a partition.

It follows `runahead.prefill.kv_runahead` step by step. In every layer a rank takes a slot, writes and sends its own
keys and values, attends to its own chunk, waits for the prefix and attends to it; chunks are passed on as they arrive;
ranks before the last stop at the last layer's send. A message waits until the receiver's slot for that layer is free
and for its turn on the wire, which serves messages in the order in which they were ready. Layers are all alike, and
sampling the first token takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from partitioner.simulation.cluster import Cluster
from partitioner.simulation.routes import Routes, routes_of
from runahead.context import ContextPartition
from runahead.timeline.trace import Span

UNKNOWN = -1.0
"""Time of an event that the simulation has not reached."""


@dataclass(kw_only=True)
class Simulated:
    """A predicted prefill; lists have one value per rank, 0 for ranks without work.

    Attributes:
        wait_s: seconds that the rank stands still until its own part is done, without the wait for its sends after it.
        spans: as a run records them; empty unless asked for.
    """

    ttft_s: float
    compute_s: list[float]
    wait_s: list[float]
    sent_bytes: list[float]
    spans: list[list[Span]] = field(default_factory=list)


def simulate(partition: ContextPartition, cluster: Cluster, *, record: bool = False) -> Simulated:
    """Simulate the prefill of a prompt with this partition.

    Args:
        partition: chunks of the leading ranks; ranks with empty ones take no part.
        record: keep the spans.

    Raises:
        ValueError: no tokens, or more chunks than ranks.
    """
    if partition.num_ranks > cluster.num_ranks:
        raise ValueError(f"context partition has {partition.num_ranks} chunks but there are {cluster.num_ranks} ranks")
    if partition.num_tokens < 1:
        raise ValueError("a context partition without tokens cannot be simulated")
    prefill = _Prefill(partition, cluster, _Recorder(partition, cluster.num_ranks) if record else None)
    prefill.run()
    size = cluster.num_ranks
    result = Simulated(
        ttft_s=prefill.end_s[-1],
        compute_s=[0.0] * size,
        wait_s=[0.0] * size,
        sent_bytes=[0.0] * size,
        spans=prefill.recorder.spans if prefill.recorder else [],
    )
    for i, rank in enumerate(partition.chain):
        result.compute_s[rank] = prefill.end_s[i] - prefill.wait_s[i]
        result.wait_s[rank] = prefill.wait_s[i]
        result.sent_bytes[rank] = prefill.sent_bytes(i)
    return result


class _Prefill:
    """State of one simulated prefill. Ranks are positions in the chain.

    A message has the number layer * routes + route. A receiver takes messages in ascending order of numbers, so the
    number of the next one describes all of its arrivals.
    """

    def __init__(self, partition: ContextPartition, cluster: Cluster, recorder: _Recorder | None) -> None:
        self.recorder = recorder
        self.routes = routes = routes_of(partition, cluster)
        self.num_routes = len(routes)
        self.as_landed = cluster.pass_on_as_landed
        self.num_layers = layers = cluster.compute.num_layers
        self.costs = _costs(partition, cluster)
        self.num_bytes = [len(partition.chunk(rank)) * cluster.kv_bytes_per_token for rank in partition.chain]
        self.busy_s = [self.num_bytes[k] / Bps for k, Bps in zip(routes.chunk, routes.bandwidth_Bps, strict=True)]
        # Layers that a rank has slots for.
        self.depth = [cluster.layers_in_flight + skew - 1 for skew in routes.layer_skew]
        size = len(self.costs)
        # The main thread of each rank: its layer, whether it has sent that layer's own KV, and until when it is busy.
        self.at, self.has_sent = [0] * size, [False] * size
        self.busy_until_s = [first for first, *_ in self.costs]
        self.end_s, self.wait_s = [UNKNOWN] * size, [0.0] * size
        self.sent_s = [[UNKNOWN] * layers for _ in range(size)]
        self.closed_s = [[UNKNOWN] * layers for _ in range(size)]
        # Slots: for layers below num_free it is known when they are free.
        self.num_free = [0] * size
        self.free_s = [[0.0] * layers for _ in range(size)]
        self.unsent = [[routes.sender.count(i)] * layers for i in range(size)]
        self.left_s = [[0.0] * layers for _ in range(size)]
        # Messages: for layers below num_arrived it is known when all have arrived.
        self.landed_s = [UNKNOWN] * (layers * self.num_routes)
        self.next_message = routes.first[:-1]
        self.num_arrived = [0 if routes.first[i] < routes.first[i + 1] else layers for i in range(size)]
        self.arrived_s = [[0.0] * layers for _ in range(size)]
        self.without_slot: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (receiver, layer) -> ready, message
        self.after_own: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (sender, layer) -> seen, message
        self.queue: list[tuple[float, int]] = []  # messages by the moment from which they may leave

    def run(self) -> None:
        for i in range(len(self.costs)):
            self._free_slots(i)
        for i in range(len(self.costs)):
            self._compute(i)
        self._move_messages()
        assert UNKNOWN not in self.end_s, f"ranks stand still in layers {self.at} of {self.num_layers}"

    def sent_bytes(self, i: int) -> float:
        """Bytes that a rank sends in all layers."""
        routes = self.routes
        sent = sum(self.num_bytes[k] for k, sender in zip(routes.chunk, routes.sender, strict=True) if sender == i)
        return sent * self.num_layers

    def _compute(self, i: int) -> None:
        """Run a rank's main thread until it depends on an event that is not known yet."""
        _, between, own, onto_prefix, last = self.costs[i]
        is_last, recorder = i == len(self.costs) - 1, self.recorder
        while self.end_s[i] == UNKNOWN:
            layer, now = self.at[i], self.busy_until_s[i]
            if not self.has_sent[i]:
                if layer >= self.num_free[i]:
                    return
                opened = max(now, self.free_s[i][layer])
                self.wait_s[i] += opened - now
                if recorder:
                    recorder.wait(i, layer, now, opened, "room")
                self._send_own(i, layer, opened)
                if layer == self.num_layers - 1 and not is_last:
                    self.end_s[i] = opened
                    if recorder:
                        recorder.compute(i, layer, opened)
                    return
                self.has_sent[i], self.busy_until_s[i] = True, opened + own
            else:
                if layer >= self.num_arrived[i]:
                    return
                began = max(now, self.arrived_s[i][layer])
                closed = began + onto_prefix
                self.wait_s[i] += began - now
                if recorder:
                    recorder.wait(i, layer, now, began, "prefix")
                    recorder.compute(i, layer, closed)
                self.closed_s[i][layer] = closed
                if layer + self.depth[i] == self.num_free[i]:
                    self._free_slots(i)
                if layer == self.num_layers - 1:
                    self.end_s[i] = closed + last
                    if recorder:
                        recorder.compute(i, None, closed + last, "last MLP and logits")
                    return
                self.at[i], self.has_sent[i], self.busy_until_s[i] = layer + 1, False, closed + between

    def _send_own(self, i: int, layer: int, opened: float) -> None:
        self.sent_s[i][layer] = opened
        for route in self.routes.own[i]:
            self._send(layer * self.num_routes + route, layer, self.routes.receiver[route], opened)
        for seen, message in self.after_own.pop((i, layer), ()):
            self._send(message, layer, i + 1, max(seen, opened))

    def _send(self, message: int, layer: int, receiver: int, ready: float) -> None:
        """Queue a message, now or once it is known when its receiver's slot is free."""
        if self.recorder:
            self.recorder.begun_s[message] = ready
        if layer < self.num_free[receiver]:
            heappush(self.queue, (max(ready, self.free_s[receiver][layer]), message))
        else:
            self.without_slot.setdefault((receiver, layer), []).append((ready, message))

    def _free_slots(self, i: int) -> None:
        """Free slots: that of the layer `depth` before, once it was attended to and its messages have left."""
        free_s, layer, depth = self.free_s[i], self.num_free[i], self.depth[i]
        while layer < self.num_layers:
            before = layer - depth
            if before >= 0:
                if self.closed_s[i][before] == UNKNOWN or self.unsent[i][before]:
                    return
                free_s[layer] = max(free_s[layer - 1], self.closed_s[i][before], self.left_s[i][before])
            for ready, message in self.without_slot.pop((i, layer), ()):
                heappush(self.queue, (max(ready, free_s[layer]), message))
            layer += 1
            self.num_free[i] = layer

    def _move_messages(self) -> None:
        """Send messages in the order of time. Most of a simulation's time is spent here, hence the local names."""
        sender, receiver, wire, port = self.routes.sender, self.routes.receiver, self.routes.wire, self.routes.port
        busy_s, latency_s = self.busy_s, self.routes.latency_s
        queue, landed_s, next_message, recorder = self.queue, self.landed_s, self.next_message, self.recorder
        num_free, depth = self.num_free, self.depth
        num_routes, num_messages = self.num_routes, len(self.landed_s)
        wire_free_s = [0.0] * self.routes.num_wires
        seen_s = [0.0] * len(self.costs)
        while queue:
            now, message = heappop(queue)
            arrives = message >= num_messages  # at a port; it left on a wire before
            if arrives:
                message -= num_messages
            layer, route = divmod(message, num_routes)
            w = port[route] if arrives else wire[route]
            begin = wire_free_s[w]
            if begin < now:
                begin = now
            end = wire_free_s[w] = begin + busy_s[route]
            if not arrives:
                i = sender[route]
                if self.left_s[i][layer] < end:
                    self.left_s[i][layer] = end
                if recorder:
                    recorder.send(message, layer, route, self.routes, end)
                unsent = self.unsent[i]
                unsent[layer] -= 1
                if not unsent[layer] and layer + depth[i] == num_free[i]:
                    self._free_slots(i)
                    self._compute(i)
                if port[route] >= 0:
                    heappush(queue, (begin, message + num_messages))
                    continue
            landed_s[message] = end + latency_s[route]
            j = receiver[route]
            if next_message[j] == message:
                seen_s[j] = self._look(j, layer, route, message, seen_s[j])

    def _look(self, j: int, layer: int, route: int, message: int, seen: float) -> float:
        """Let a receiver take the arrived messages in order and pass them on; return when it took the last."""
        routes, landed_s, queue, num_routes = self.routes, self.landed_s, self.queue, self.num_routes
        first, end, onward = routes.first[j], routes.first[j + 1], routes.onward
        passes_on = onward[first] >= 0
        num_free, free_s = (self.num_free[j + 1], self.free_s[j + 1]) if passes_on else (0, [])
        direct = self.as_landed and not self.recorder
        begun_layer = layer
        while True:
            if seen < landed_s[message]:
                seen = landed_s[message]
            if passes_on:
                further = message - route + onward[route]
                if direct and layer < num_free:  # as _send, without the call, for most messages
                    free = free_s[layer]
                    heappush(queue, (seen if seen > free else free, further))
                elif self.as_landed:
                    self._send(further, layer, j + 1, seen)
                elif self.sent_s[j][layer] != UNKNOWN:
                    self._send(further, layer, j + 1, max(seen, self.sent_s[j][layer]))
                else:
                    self.after_own.setdefault((j, layer), []).append((seen, further))
            route += 1
            message += 1
            if route == end:
                self.arrived_s[j][layer] = seen
                layer += 1
                route, message = first, layer * num_routes + first
                if layer == self.num_layers:
                    message = -1
                    break
            if landed_s[message] == UNKNOWN:
                break
        self.next_message[j] = message
        if layer > begun_layer:
            self.num_arrived[j] = layer
            self._compute(j)
        return seen


def _costs(partition: ContextPartition, cluster: Cluster) -> list[tuple[float, float, float, float, float]]:
    """Seconds of the steps (first, between, own, prefix, last) of each rank of the chain."""
    costs, compute = [], cluster.compute
    for rank in partition.chain:
        speed, c, P = cluster.speed[rank], len(partition.chunk(rank)), partition.chunk(rank).start
        first, between, last = compute.first(c) / speed, compute.between(c) / speed, compute.last(c) / speed
        costs.append((first, between, compute.own(c) / speed, compute.prefix(c, P) / speed, last))
    return costs


class _Recorder:
    """Records the spans of ranks, which are given as positions in the chain."""

    def __init__(self, partition: ContextPartition, num_ranks: int) -> None:
        self._partition, self._chain = partition, partition.chain
        self._until_s = [0.0] * len(self._chain)  # end of what is recorded of each main thread
        self.begun_s: dict[int, float] = {}
        self.spans: list[list[Span]] = [[] for _ in range(num_ranks)]

    def compute(self, i: int, layer: int | None, end: float, detail: str = "") -> None:
        """Record that the rank computed from its last recorded span to `end`."""
        if end > self._until_s[i]:
            self._add(i, Span(kind="compute", layer=layer, start_s=self._until_s[i], end_s=end, detail=detail))

    def wait(self, i: int, layer: int, begin: float, end: float, what_for: str) -> None:
        if end > begin:
            self.compute(i, layer, begin)
            self._add(i, Span(kind="wait", layer=layer, start_s=begin, end_s=end, detail=what_for))

    def send(self, message: int, layer: int, route: int, routes: Routes, end: float) -> None:
        chunk = self._partition.chunk(self._chain[routes.chunk[route]])
        detail = f"tokens {chunk.start}-{chunk.stop} to rank {self._chain[routes.receiver[route]]}"
        span = Span(kind="send", layer=layer, start_s=self.begun_s[message], end_s=end, detail=detail)
        self.spans[self._chain[routes.sender[route]]].append(span)

    def _add(self, i: int, span: Span) -> None:
        self.spans[self._chain[i]].append(span)
        self._until_s[i] = span.end_s
