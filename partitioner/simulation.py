"""TTFT of a partition, predicted: an event simulation of the chain of ranks, message by message.

It follows `runahead.prefill.kv_runahead` step by step. In every layer a rank takes a slot, writes and sends its own
K,V, attends to its own chunk, waits for the prefix, attends to it and goes on; pieces are passed on as they land; ranks
before the last stop at the last layer's send. A message waits until the receiver's slot for that layer is free and for
its turn on the wire, which serves messages in the order in which they could have left. All layers are alike, and of
the first token only the forward counts, not sampling it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from partitioner.compute_cost import ComputeCost
from partitioner.link import Links
from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import TransferSchedule
from runahead.timeline import Span

UNKNOWN = -1.0
"""A moment that the simulation has not reached."""


@dataclass(kw_only=True)
class Cluster:
    """What a prefill runs on.

    Attributes:
        compute: cost of the measured device.
        speed: per rank, relative to that device; 0.5 takes twice as long.
        links: None is free communication, which gives the paper's practical bound TTFT(p).
        kv_bytes_per_token: bytes of K and V of one token in one layer, all rows of the batch together.
        layers_in_flight: as `prefill.layers_in_flight`.
        pass_on_as_landed: as Gloo does; otherwise, as NCCL does, a piece is passed on behind the own chunk.

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

    def __post_init__(self) -> None:
        if not self.speed or any(not 0 < speed < inf for speed in self.speed):
            raise ValueError(f"ranks' speeds {self.speed} must be above 0, one per rank; 1 is the measured device")
        if self.links is not None and self.links.num_ranks != self.num_ranks:
            raise ValueError(f"links join {self.links.num_ranks} ranks but there are speeds for {self.num_ranks}")
        if not 0 <= self.kv_bytes_per_token < inf:
            raise ValueError(f"K,V of {self.kv_bytes_per_token} bytes per token must be at least 0")
        if self.layers_in_flight < 2:
            raise ValueError(f"prefill.layers_in_flight={self.layers_in_flight} must be at least 2")

    @property
    def num_ranks(self) -> int:
        return len(self.speed)

    def without_communication(self) -> Cluster:
        """The same ranks with K,V that arrive at once."""
        return replace(self, links=None)

    def permuted(self, order: Sequence[int]) -> Cluster:
        """The cluster when rank r is played by what was rank order[r]; leaving some out makes it smaller.

        Raises:
            ValueError: a rank that is not there, or is there twice.
        """
        if len(set(order)) != len(order) or any(not 0 <= rank < self.num_ranks for rank in order):
            raise ValueError(f"order of ranks {list(order)} must name different ranks of 0 to {self.num_ranks - 1}")
        links = None if self.links is None else self.links.permuted(order)
        return replace(self, speed=[self.speed[rank] for rank in order], links=links)


@dataclass(kw_only=True)
class Simulated:
    """A predicted prefill; one value per rank, 0 for ranks without work.

    Attributes:
        wait_s: standing still until the rank's own part is done; not what it waits after that for its K,V to leave.
        spans: as a run records them; empty unless asked for.
    """

    ttft_s: float
    compute_s: list[float]
    wait_s: list[float]
    sent_bytes: list[float]
    spans: list[list[Span]] = field(default_factory=list)


def simulate(partition: ContextPartition, cluster: Cluster, *, record: bool = False) -> Simulated:
    """The prefill of a prompt with this partition.

    Args:
        partition: chunks of the leading ranks; empty ones take no part.
        record: keep the spans.

    Raises:
        ValueError: no tokens, or more chunks than ranks.
    """
    if partition.num_ranks > cluster.num_ranks:
        raise ValueError(f"context partition has {partition.num_ranks} chunks but {cluster.num_ranks} ranks")
    if partition.num_tokens < 1:
        raise ValueError("context partition has no tokens")
    return _Prefill(partition, cluster, record).run()


class _Prefill:
    """One simulated prefill.

    Ranks are positions in the chain. Every message has a number: layer * routes + route, where the routes to a
    receiver are consecutive and in the order in which it looks at what arrives. So numbers ascend with layers, and
    `next_message` of a receiver is all that is known of its arrivals.
    """

    def __init__(self, partition: ContextPartition, cluster: Cluster, record: bool) -> None:
        self.partition, self.cluster, self.record = partition, cluster, record
        self.chain = partition.chain
        self.num_layers = cluster.compute.num_layers
        self._set_costs()
        self._set_routes()
        size, layers = len(self.chain), self.num_layers
        # What each rank's main thread has done. `at`: its layer; `sent`: has it sent that layer's own K,V?
        self.at, self.sent = [0] * size, [False] * size
        self.ready_s = [cost[0] for cost in self.costs]  # the layer's K,V, then its own attention, are done
        self.end_s, self.wait_s = [UNKNOWN] * size, [0.0] * size
        self.sent_s = [[UNKNOWN] * layers for _ in range(size)]
        self.closed_s = [[UNKNOWN] * layers for _ in range(size)]
        # Slots: of layers below num_free it is known when they are free.
        self.free_s = [[0.0] * layers for _ in range(size)]
        self.num_free = [0] * size
        self.unsent = [[each] * layers for each in self.num_sends]
        self.left_s = [[0.0] * layers for _ in range(size)]
        # Messages.
        self.landed_s = [UNKNOWN] * (layers * len(self.receiver))
        self.next_message = [self.first_route[i] for i in range(size)]
        self.num_arrived = [0 if self.first_route[i] < self.first_route[i + 1] else layers for i in range(size)]
        self.arrived_s = [[0.0] * layers for _ in range(size)]
        self.held: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (receiver, layer) -> waits for its slot
        self.behind_own: dict[tuple[int, int], list[tuple[float, int]]] = {}  # (sender, layer) -> waits for its own
        self.queue: list[tuple[float, int]] = []  # messages by the moment from which they could leave
        self.spans: list[list[Span]] = [[] for _ in range(partition.num_ranks)]
        self.noted_s = [0.0] * size
        self.begun_s: dict[int, float] = {}

    def _set_costs(self) -> None:
        """Seconds per rank: first, between, own, prefix, last."""
        compute = self.cluster.compute
        self.costs: list[tuple[float, float, float, float, float]] = []
        for rank in self.chain:
            chunk, speed = self.partition.chunk(rank), self.cluster.speed[rank]
            c, prefix = len(chunk), chunk.start
            steps = compute.first(c), compute.between(c), compute.own(c), compute.prefix(c, prefix), compute.last(c)
            first, between, own, onto_prefix, last = (seconds / speed for seconds in steps)
            self.costs.append((first, between, own, onto_prefix, last))

    def _set_routes(self) -> None:
        """What travels in every layer, from the schedule that the ranks themselves follow."""
        chain, cluster = self.chain, self.cluster
        size = len(chain)
        self.sender: list[int] = []
        self.receiver: list[int] = []
        self.first_route: list[int] = []
        self.busy_s: list[float] = []  # the wire
        self.latency_s: list[float] = []
        self.wire: list[int] = []  # number of the wire on which it leaves
        self.port: list[int] = []  # number of the shared port at which it arrives, or -1
        self.span: list[tuple[int, int]] = []
        self.own_routes: list[list[int]] = [[] for _ in chain]
        self.num_sends, self.sent_bytes = [0] * size, [0.0] * size
        self.depth: list[int] = []
        place = {rank: position for position, rank in enumerate(chain)}
        wires: dict[tuple[int, int], int] = {}
        of_piece: dict[tuple[int, int], int] = {}
        for i, rank in enumerate(chain):
            schedule = TransferSchedule(self.partition, rank, cluster.transfer, lambda layer, start: 0)
            self.depth.append(cluster.layers_in_flight + schedule.skew() - 1)
            self.first_route.append(len(self.receiver))
            for message in schedule.receives(0):
                route, k = len(self.receiver), place[message.peer]
                link = None if cluster.links is None else cluster.links.between(message.peer, rank)
                shared = link is not None and link.shared
                num_bytes = (message.end - message.start) * cluster.kv_bytes_per_token
                self.sender.append(k)
                self.receiver.append(i)
                self.busy_s.append(0.0 if link is None else num_bytes / link.bandwidth_Bps)
                self.latency_s.append(0.0 if link is None else link.latency_s)
                self.wire.append(wires.setdefault((k, -1) if shared else (k, i), len(wires)))
                self.port.append(wires.setdefault((-1, i), len(wires)) if shared else -1)
                self.span.append((message.start, message.end))
                of_piece[message.piece, i] = route
                if message.piece == k:
                    self.own_routes[k].append(route)
                self.num_sends[k] += 1
                self.sent_bytes[k] += num_bytes * self.num_layers
        self.first_route.append(len(self.receiver))
        self.wire_free_s = [0.0] * len(wires)
        relays = cluster.transfer is Transfer.relay
        # A relay receives what it passes on: piece by piece, to the next rank.
        self.onward = [-1] * len(self.receiver)
        if relays:
            for (piece, i), route in of_piece.items():
                self.onward[route] = of_piece.get((piece, i + 1), -1)

    def run(self) -> Simulated:
        for i in range(len(self.chain)):
            self._free_slots(i)
        for i in range(len(self.chain)):
            self._compute(i)
        self._move_messages()
        assert UNKNOWN not in self.end_s, f"the chain stands still in layers {self.at} of {self.num_layers}"
        total = self.cluster.num_ranks
        result = Simulated(
            ttft_s=self.end_s[-1], compute_s=[0.0] * total, wait_s=[0.0] * total, sent_bytes=[0.0] * total
        )
        for i, rank in enumerate(self.chain):
            result.compute_s[rank] = self.end_s[i] - self.wait_s[i]
            result.wait_s[rank], result.sent_bytes[rank] = self.wait_s[i], self.sent_bytes[i]
        if self.record:
            result.spans = self.spans + [[] for _ in range(total - len(self.spans))]
        return result

    def _compute(self, i: int) -> None:
        """Run a rank's main thread as far as what is known allows."""
        _, between, own, onto_prefix, last = self.costs[i]
        is_last = i == len(self.chain) - 1
        while self.end_s[i] == UNKNOWN:
            layer, ready = self.at[i], self.ready_s[i]
            if not self.sent[i]:
                if layer >= self.num_free[i]:
                    return
                opened = max(ready, self.free_s[i][layer])
                self.wait_s[i] += opened - ready
                self.sent_s[i][layer] = opened
                self._send_own(i, layer, opened)
                self._note_wait(i, layer, ready, opened, "room")
                if layer == self.num_layers - 1 and not is_last:
                    self.end_s[i] = opened
                    self._note_compute(i, layer, opened)
                    return
                self.sent[i], self.ready_s[i] = True, opened + own
                continue
            if layer >= self.num_arrived[i]:
                return
            began = max(ready, self.arrived_s[i][layer])
            self.wait_s[i] += began - ready
            closed = began + onto_prefix
            self._note_wait(i, layer, ready, began, "prefix")
            self._note_compute(i, layer, closed)
            self.closed_s[i][layer] = closed
            self._free_slots(i)
            if layer == self.num_layers - 1:
                self.end_s[i] = closed + last
                self._note_compute(i, None, self.end_s[i], "last MLP and logits")
                return
            self.at[i], self.sent[i], self.ready_s[i] = layer + 1, False, closed + between

    def _send_own(self, i: int, layer: int, opened: float) -> None:
        base = layer * len(self.receiver)
        for route in self.own_routes[i]:
            self._send(base + route, layer, self.receiver[route], opened)
        for seen, message in self.behind_own.pop((i, layer), ()):
            self._send(message, layer, i + 1, max(seen, opened))

    def _send(self, message: int, layer: int, receiver: int, ready: float) -> None:
        """Queue a message, once its receiver's slot is known to be free."""
        if self.record:
            self.begun_s[message] = ready
        if layer < self.num_free[receiver]:
            heappush(self.queue, (max(ready, self.free_s[receiver][layer]), message))
        else:
            self.held.setdefault((receiver, layer), []).append((ready, message))

    def _free_slots(self, i: int) -> None:
        """A layer's slot is free once the layer `depth` before it was attended to and its messages have left."""
        free_s, layer = self.free_s[i], self.num_free[i]
        while layer < self.num_layers:
            before = layer - self.depth[i]
            if before >= 0:
                if self.closed_s[i][before] == UNKNOWN or self.unsent[i][before]:
                    break
                free_s[layer] = max(free_s[layer - 1], self.closed_s[i][before], self.left_s[i][before])
            for ready, message in self.held.pop((i, layer), ()):
                heappush(self.queue, (max(ready, free_s[layer]), message))
            layer += 1
            self.num_free[i] = layer

    def _move_messages(self) -> None:
        """The loop that all time goes into: lists are locals, and nothing is looked up twice."""
        queue, landed_s, wire_free_s = self.queue, self.landed_s, self.wire_free_s
        sender, receiver, wire, port = self.sender, self.receiver, self.wire, self.port
        busy_s, latency_s, onward, first_route = self.busy_s, self.latency_s, self.onward, self.first_route
        unsent, left_s, next_message, num_free, free_s = (
            self.unsent,
            self.left_s,
            self.next_message,
            self.num_free,
            self.free_s,
        )
        routes, num_messages, record = len(receiver), len(landed_s), self.record
        seen_s = [0.0] * len(self.chain)
        as_landed = self.cluster.pass_on_as_landed
        while queue:
            now, message = heappop(queue)
            if message < num_messages:  # it takes the sender's wire
                layer, route = divmod(message, routes)
                w = wire[route]
                begin = wire_free_s[w]
                if begin < now:
                    begin = now
                left = begin + busy_s[route]
                wire_free_s[w] = left
                i = sender[route]
                of_rank = left_s[i]
                if of_rank[layer] < left:
                    of_rank[layer] = left
                counts = unsent[i]
                counts[layer] -= 1
                if record:
                    self._note_send(message, left)
                if not counts[layer]:
                    self._free_slots(i)
                    self._compute(i)
                if port[route] >= 0:
                    heappush(queue, (begin, message + num_messages))
                    continue
            else:  # it arrives at a port that the receiver's links share
                message -= num_messages
                layer, route = divmod(message, routes)
                w = port[route]
                begin = wire_free_s[w]
                if begin < now:
                    begin = now
                left = wire_free_s[w] = begin + busy_s[route]
            landed_s[message] = left + latency_s[route]
            j = receiver[route]
            if next_message[j] != message:
                continue
            # The receiver looks at what has arrived in order, and passes it on.
            seen, end, arrived = seen_s[j], first_route[j + 1], False
            free, known = free_s[j + 1] if end < routes else (), num_free[j + 1] if end < routes else 0
            while True:
                if seen < landed_s[message]:
                    seen = landed_s[message]
                to = onward[route]
                if to >= 0:
                    further = message - route + to
                    if as_landed and layer < known and not record:  # what _send does, for the many
                        heappush(queue, (seen if seen > free[layer] else free[layer], further))
                    elif as_landed:
                        self._send(further, layer, j + 1, seen)
                    elif self.sent_s[j][layer] != UNKNOWN:
                        self._send(further, layer, j + 1, max(seen, self.sent_s[j][layer]))
                    else:
                        self.behind_own.setdefault((j, layer), []).append((seen, further))
                route += 1
                message += 1
                if route == end:
                    self.arrived_s[j][layer] = seen
                    arrived = True
                    layer += 1
                    route = first_route[j]
                    message = layer * routes + route
                    if layer == self.num_layers:
                        message = -1
                        break
                if landed_s[message] == UNKNOWN:
                    break
            next_message[j], seen_s[j] = message, seen
            if arrived:
                self.num_arrived[j] = layer
                self._compute(j)

    def _note_wait(self, i: int, layer: int, begin: float, end: float, waits_for: str) -> None:
        if self.record and end > begin:
            self._note_compute(i, layer, begin)
            self._note_span(i, Span(kind="wait", layer=layer, start_s=begin, end_s=end, detail=waits_for))

    def _note_compute(self, i: int, layer: int | None, end: float, detail: str = "") -> None:
        """A rank computed since whatever was noted of it before."""
        if self.record and end > self.noted_s[i]:
            self._note_span(i, Span(kind="compute", layer=layer, start_s=self.noted_s[i], end_s=end, detail=detail))

    def _note_span(self, i: int, span: Span) -> None:
        self.spans[self.chain[i]].append(span)
        self.noted_s[i] = span.end_s

    def _note_send(self, message: int, left: float) -> None:
        layer, route = divmod(message, len(self.receiver))
        start, end = self.span[route]
        detail = f"tokens {start}-{end} to rank {self.chain[self.receiver[route]]}"
        begin = self.begun_s[message]
        span = Span(kind="send", layer=layer, start_s=begin, end_s=left, detail=detail)
        self.spans[self.chain[self.sender[route]]].append(span)
