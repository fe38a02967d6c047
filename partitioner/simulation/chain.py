"""Event simulation of the chain of ranks, message by message, which predicts the TTFT of a partition.

It follows `runahead.prefill.kv_runahead` step by step. In every layer a rank takes a slot, writes and sends its own
keys and values, attends to its own chunk, waits for the prefix and attends to it; chunks are passed on as they arrive;
ranks before the last stop at the last layer's send. A message waits until the receiver's slot for that layer is free
and for its turn on the wire, which serves messages in the order in which they were ready. Where a layer holds a state,
a rank takes a slot, waits for the state of the rank before, computes its own part, and sends the state on to the next
rank alone. A "layer" here is a place of the `ComputeCost`; those of a kind are alike, and sampling the first token
takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from partitioner.simulation.cluster import Cluster, Steps
from partitioner.simulation.routes import Routes, routes_of
from runahead.context import ContextPartition
from runahead.timeline.trace import TraceSpan

UNKNOWN = -1.0
"""Time of an event that the simulation has not reached."""


@dataclass(kw_only=True)
class Simulated:
    """A predicted prefill; lists have one value per rank, 0 for ranks without work.

    Attributes:
        wait_s: seconds that the rank stands still until its own part is done, without the wait for its sends after it.
        spans: as a run records them, with the numbers of places as layers; empty unless asked for.
    """

    ttft_s: float
    compute_s: list[float]
    wait_s: list[float]
    sent_bytes: list[float]
    spans: list[list[TraceSpan]] = field(default_factory=list)


def simulate(partition: ContextPartition, cluster: Cluster, *, record: bool = False) -> Simulated:
    """Simulate the prefill of a prompt with this partition.

    Args:
        partition: chunks of the leading ranks, rounded to blocks as in a run; ranks with empty ones take no part.
        record: keep the spans.

    Raises:
        ValueError: no tokens, or more chunks than ranks.
    """
    if partition.num_ranks > cluster.num_ranks:
        raise ValueError(f"context partition has {partition.num_ranks} chunks but there are {cluster.num_ranks} ranks")
    if partition.num_tokens < 1:
        raise ValueError("a context partition without tokens cannot be simulated")
    if cluster.block > 1:
        partition = partition.in_blocks(cluster.block)
    prefill = _SimulatedPrefill(partition, cluster)
    prefill.run()
    size = cluster.num_ranks
    result = Simulated(
        ttft_s=prefill.end_s[-1],
        compute_s=[0.0] * size,
        wait_s=[0.0] * size,
        sent_bytes=[0.0] * size,
        spans=[[] for _ in range(size)] if record else [],
    )
    for i, rank in enumerate(partition.chain):
        result.wait_s[rank] = sum(end - begin for _, begin, end, _ in prefill.waits(i))
        result.compute_s[rank] = prefill.end_s[i] - result.wait_s[rank]
        result.sent_bytes[rank] = prefill.sent_bytes(i)
        if record:
            result.spans[rank] = [*prefill.main_spans(i), *prefill.send_spans(i, partition)]
    return result


def _bytes_by_route(partition: ContextPartition, cluster: Cluster, routes: Routes) -> list[float]:
    """Bytes of the keys and values of one layer, by route. What heads need that stream comes with the nearest chunk."""
    chain, streams, found = partition.chain, cluster.streams, list[float]()
    for sender, receiver, k in zip(routes.sender, routes.receiver, routes.chunk, strict=True):
        tokens: float = len(partition.chunk(chain[k]))
        if streams is not None:
            is_nearest = k == sender and receiver == sender + 1
            prefix_tokens = partition.chunk(chain[receiver]).start if is_nearest else 0
            tokens = streams.sent_tokens(len(partition.chunk(chain[k])), prefix_tokens)
        found.append(tokens * cluster.kv_bytes_per_token)
    return found


class _SimulatedPrefill:
    """State of one simulated prefill. Ranks are positions in the chain.

    A message has the number layer * routes + route. A receiver takes messages in ascending order of numbers, so the
    number of the next one describes all of its arrivals.
    """

    def __init__(self, partition: ContextPartition, cluster: Cluster) -> None:
        self.routes = routes = routes_of(partition, cluster)
        self.num_routes = len(routes)
        self.as_landed = cluster.pass_on_as_landed
        self.num_places = layers = cluster.compute.num_places
        self.is_state = [False] * layers
        for place in cluster.compute.states:
            self.is_state[place] = True
        self.costs: list[Steps] = [cluster.steps_s(partition, rank) for rank in partition.chain]
        self.num_bytes = _bytes_by_route(partition, cluster, routes)
        self.busy_s = [num_bytes / Bps for num_bytes, Bps in zip(self.num_bytes, routes.bandwidth_Bps, strict=True)]
        self.state_bytes = cluster.state_bytes
        self.state_busy_s = [self.state_bytes / Bps for Bps in routes.bandwidth_Bps]
        # Layers that a rank has slots for.
        self.depth = [cluster.layers_in_flight + skew - 1 for skew in routes.layer_skew]
        size = len(self.costs)
        # The main thread of each rank: its layer, whether it has sent that layer's own KV, and until when it is busy.
        self.at, self.has_sent = [0] * size, [False] * size
        self.busy_until_s = [steps.first for steps in self.costs]
        self.end_s = [UNKNOWN] * size
        self.sent_s = [[UNKNOWN] * layers for _ in range(size)]
        self.closed_s = [[UNKNOWN] * layers for _ in range(size)]
        # Slots: for layers below num_free it is known when they are free.
        self.num_free = [0] * size
        self.free_s = [[0.0] * layers for _ in range(size)]
        self.outgoing = [[route for route, sender in enumerate(routes.sender) if sender == i] for i in range(size)]
        self.unsent = [
            [min(1, len(outgoing)) if is_state else len(outgoing) for is_state in self.is_state]
            for outgoing in self.outgoing
        ]
        self.emptied_s = [[0.0] * layers for _ in range(size)]
        # Messages: for layers below num_arrived it is known when all have arrived.
        self.left_s = [UNKNOWN] * (layers * self.num_routes)
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
        assert UNKNOWN not in self.end_s, f"ranks stand still in layers {self.at} of {self.num_places}"

    def sent_bytes(self, i: int) -> float:
        """Bytes that a rank sends in all layers."""
        num_states, num_bytes = sum(self.is_state), [self.num_bytes[route] for route in self.outgoing[i]]
        states = num_states * self.state_bytes if i < len(self.costs) - 1 else 0
        return sum(num_bytes) * (self.num_places - num_states) + states

    def _compute(self, i: int) -> None:
        """Run a rank's main thread until it depends on an event that is not known yet."""
        _, between, own, onto_prefix, state, last = self.costs[i]
        is_last = i == len(self.costs) - 1
        while self.end_s[i] == UNKNOWN:
            layer, now = self.at[i], self.busy_until_s[i]
            if self.is_state[layer]:
                if layer >= self.num_free[i] or layer >= self.num_arrived[i]:
                    return
                closed = max(now, self.free_s[i][layer], self.arrived_s[i][layer]) + state
                self._send_own(i, layer, closed)
                if layer == self.num_places - 1 and not is_last:
                    self.closed_s[i][layer] = self.end_s[i] = closed
                    return
            elif not self.has_sent[i]:
                if layer >= self.num_free[i]:
                    return
                opened = max(now, self.free_s[i][layer])
                self._send_own(i, layer, opened)
                if layer == self.num_places - 1 and not is_last:
                    self.end_s[i] = opened
                    return
                self.has_sent[i], self.busy_until_s[i] = True, opened + own
                continue
            else:
                if layer >= self.num_arrived[i]:
                    return
                began = max(now, self.arrived_s[i][layer])
                closed = began + onto_prefix
            self.closed_s[i][layer] = closed
            if layer + self.depth[i] == self.num_free[i]:
                self._free_slots(i)
            if layer == self.num_places - 1:
                self.end_s[i] = closed + last
                return
            self.at[i], self.has_sent[i], self.busy_until_s[i] = layer + 1, False, closed + between

    def _send_own(self, i: int, layer: int, opened: float) -> None:
        """Send what is the rank's own: keys and values by all routes of its own, a state to the next rank alone."""
        self.sent_s[i][layer] = opened
        for route in self.routes.own[i][:1] if self.is_state[layer] else self.routes.own[i]:
            self._send(layer * self.num_routes + route, layer, self.routes.receiver[route], opened)
        for seen, message in self.after_own.pop((i, layer), ()):
            self._send(message, layer, i + 1, max(seen, opened))

    def _send(self, message: int, layer: int, receiver: int, ready: float) -> None:
        """Queue a message, now or once it is known when its receiver's slot is free."""
        if layer < self.num_free[receiver]:
            heappush(self.queue, (max(ready, self.free_s[receiver][layer]), message))
        else:
            self.without_slot.setdefault((receiver, layer), []).append((ready, message))

    def _free_slots(self, i: int) -> None:
        """Free slots: that of the layer `depth` before, once it was attended to and its messages have left."""
        free_s, layer, depth = self.free_s[i], self.num_free[i], self.depth[i]
        while layer < self.num_places:
            before = layer - depth
            if before >= 0:
                if self.closed_s[i][before] == UNKNOWN or self.unsent[i][before]:
                    return
                free_s[layer] = max(free_s[layer - 1], self.closed_s[i][before], self.emptied_s[i][before])
            for ready, message in self.without_slot.pop((i, layer), ()):
                heappush(self.queue, (max(ready, free_s[layer]), message))
            layer += 1
            self.num_free[i] = layer

    def _move_messages(self) -> None:
        """Send messages in the order of time. Most of a simulation's time is spent here, hence the local names."""
        sender, receiver, wire, port = self.routes.sender, self.routes.receiver, self.routes.wire, self.routes.port
        busy_by_kind, is_state, latency_s = (self.busy_s, self.state_busy_s), self.is_state, self.routes.latency_s
        queue, left_s, landed_s, next_message = self.queue, self.left_s, self.landed_s, self.next_message
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
            end = wire_free_s[w] = begin + busy_by_kind[is_state[layer]][route]
            if not arrives:
                i = sender[route]
                left_s[message] = end
                if self.emptied_s[i][layer] < end:
                    self.emptied_s[i][layer] = end
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
        routes, landed_s, num_routes, is_state = self.routes, self.landed_s, self.num_routes, self.is_state
        first, end, onward = routes.first[j], routes.first[j + 1], routes.onward
        passes_on = onward[first] >= 0
        begun_layer = layer
        while True:
            if seen < landed_s[message]:
                seen = landed_s[message]
            if passes_on and not is_state[layer]:
                further = message - route + onward[route]
                if self.as_landed:
                    self._send(further, layer, j + 1, seen)
                elif self.sent_s[j][layer] != UNKNOWN:
                    self._send(further, layer, j + 1, max(seen, self.sent_s[j][layer]))
                else:
                    self.after_own.setdefault((j, layer), []).append((seen, further))
            route += 1
            message += 1
            if route == end or is_state[layer]:  # the state is the rank before's own, which is the first route
                self.arrived_s[j][layer] = seen
                layer += 1
                route, message = first, layer * num_routes + first
                if layer == self.num_places:
                    message = -1
                    break
            if landed_s[message] == UNKNOWN:
                break
        self.next_message[j] = message
        if layer > begun_layer:
            self.num_arrived[j] = layer
            self._compute(j)
        return seen

    def waits(self, i: int) -> Iterator[tuple[int, float, float, str]]:
        """Layer, begin, end and cause of each wait of a rank's main thread, after the run."""
        known, between, own, *_ = self.costs[i]
        for layer, (opened, closed) in enumerate(zip(self.sent_s[i], self.closed_s[i], strict=True)):
            if self.is_state[layer]:
                opened = max(known, self.free_s[i][layer])
            yield layer, known, opened, "room"
            if self.is_state[layer]:
                yield layer, opened, max(opened, self.arrived_s[i][layer]), "state"
            elif closed != UNKNOWN:
                attended = opened + own
                yield layer, attended, max(attended, self.arrived_s[i][layer]), "prefix"
            known = closed + between

    def main_spans(self, i: int) -> Iterator[TraceSpan]:
        """Spans of a rank's main thread: its waits, and the compute between them."""
        moments: list[tuple[str, int | None, float, str]] = []  # kind, layer, end, detail
        for layer, begin, end, cause in self.waits(i):
            if end > begin:
                moments += [("compute", layer, begin, ""), ("wait", layer, end, cause)]
            if cause != "room":
                moments.append(("compute", layer, self.closed_s[i][layer], ""))
        if i == len(self.costs) - 1:
            moments.append(("compute", None, self.end_s[i], "last MLP and logits"))
        else:
            moments.append(("compute", self.num_places - 1, self.end_s[i], ""))
        start = 0.0
        for kind, at, end, detail in moments:
            if end > start:
                yield TraceSpan(kind=kind, layer=at, start_s=start, end_s=end, detail=detail)
                start = end

    def send_spans(self, i: int, partition: ContextPartition) -> Iterator[TraceSpan]:
        """A rank's messages, each from when it was ready until it had left."""
        routes, chain, seen = self.routes, partition.chain, 0.0
        for layer, opened in enumerate(self.sent_s[i]):
            ready_s = {i: opened}  # by chunk
            for route in range(routes.first[i], routes.first[i + 1]):
                seen = max(seen, self.landed_s[layer * self.num_routes + route])
                ready_s[routes.chunk[route]] = seen if self.as_landed else max(seen, opened)
            for route in self.outgoing[i][:1] if self.is_state[layer] else self.outgoing[i]:
                k, left_s = routes.chunk[route], self.left_s[layer * self.num_routes + route]
                chunk = partition.chunk(chain[k])
                what = "state" if self.is_state[layer] else f"tokens {chunk.start}-{chunk.stop}"
                detail = f"{what} to rank {chain[routes.receiver[route]]}"
                yield TraceSpan(kind="send", layer=layer, start_s=ready_s[k], end_s=left_s, detail=detail)
