"""Simulated TTFT of TSP and zigzag, with which KV-Runahead is compared: all ranks gather KV in every layer.

Both keep ranks in step: the all-gather of a layer begins when the slowest rank has its keys and values, and takes as
long as on the slowest link. With a cluster's relay transfer it is a ring of p - 1 steps, in each of which every rank
sends the KV of C/p tokens to the next. With direct transfer every rank sends them to all others: at once if every pair
has a wire of its own, one after the other through a shared port. The compute cost is that of `simulate`.
"""

from __future__ import annotations

from partitioner.cost.compute import ComputeCost
from partitioner.simulation.chain import Simulated
from partitioner.simulation.cluster import Cluster
from runahead.config import Attention, Transfer


def simulate_tsp(
    num_tokens: int, num_ranks: int, cluster: Cluster, *, attention: Attention = Attention.dense
) -> Simulated:
    """Simulate tensor/sequence parallelism, the paper's baseline: gather KV, then attend, without overlap.

    Args:
        attention: dense, as published: each rank's C/p queries attend to all C keys, and scores are masked afterwards.
            Causal, with a kernel that skips masked keys: rank i attends to (i + 1) C/p keys, and the others wait for
            the last one in every layer.

    Raises:
        ValueError: no tokens, or more ranks than the cluster has.
    """
    check_prompt(num_tokens, num_ranks, cluster)
    compute, c = cluster.compute, num_tokens / num_ranks
    attention_s = [
        compute.prefix(c, num_tokens) if attention is Attention.dense else compute.own(c) + compute.prefix(c, rank * c)
        for rank in range(num_ranks)
    ]
    gather_s = max(_arrivals_s(c, num_ranks, cluster), default=0.0)
    in_step_s = 0.0  # when all ranks have gathered a layer
    ready_s = [compute.first(c) / cluster.speed[rank] for rank in range(num_ranks)]
    for layer in range(compute.num_places):
        in_step_s = max(ready_s) + gather_s
        follows_s = _last_s(compute, c) if layer == compute.num_places - 1 else compute.between(c)
        ready_s = [in_step_s + (attention_s[rank] + follows_s) / cluster.speed[rank] for rank in range(num_ranks)]
    return _simulated(ready_s, -1, c, attention_s, cluster)


def simulate_zigzag(num_tokens: int, num_ranks: int, cluster: Cluster, *, ring: bool = False) -> Simulated:
    """Simulate context parallelism with a balanced split: of 2p chunks of C/2p tokens rank i has i and 2p - 1 - i.

    Every rank then attends to equally many keys, with a causal kernel. While KV are gathered it attends to its own two
    chunks, in one call, since they are causal in their order. The prompt's last token is on rank 0.

    Args:
        ring: ring attention: the KV of each of the p - 1 steps are attended to in a call of their own, while those of
            the next step are sent; otherwise all others are attended to once they have arrived, in a call per chunk.

    Raises:
        ValueError: no tokens, or more ranks than the cluster has.
    """
    check_prompt(num_tokens, num_ranks, cluster)
    compute, a, p = cluster.compute, num_tokens / (2 * num_ranks), num_ranks
    local_s = compute.own(2 * a)
    steps_s: list[list[float]] = []  # by rank: attention to the other ranks' chunks, in the order of arrival
    for rank in range(p):
        if ring:  # both chunks attend to the first one of an earlier rank; the second attends to both of a later rank
            sources = [(rank - step) % p for step in range(1, p)]
            steps_s.append([compute.prefix(2 * a, a) if j < rank else compute.prefix(a, 2 * a) for j in sources])
        else:
            steps_s.append([compute.prefix(a, rank * a) + compute.prefix(a, (2 * p - 2 - rank) * a)])
    arrivals_s = _arrivals_s(2 * a, p, cluster)
    if not ring:
        arrivals_s = [max(arrivals_s, default=0.0)]
    ready_s = [compute.first(2 * a) / cluster.speed[rank] for rank in range(p)]
    for layer in range(compute.num_places):
        began_s = max(ready_s)
        follows_s = _last_s(compute, 2 * a) if layer == compute.num_places - 1 else compute.between(2 * a)
        for rank in range(p):
            speed = cluster.speed[rank]
            now_s = ready_s[rank] + local_s / speed
            for arrival_s, attends_s in zip(arrivals_s, steps_s[rank], strict=True):
                now_s = max(now_s, began_s + arrival_s) + attends_s / speed
            ready_s[rank] = now_s + follows_s / speed
    attention_s = [local_s + sum(each) for each in steps_s]
    return _simulated(ready_s, 0, 2 * a, attention_s, cluster)


def _last_s(compute: ComputeCost, chunk: float) -> float:
    """Seconds after the last layer's attention, which ranks that exchange keys and values compute for all tokens."""
    return max(0.0, compute.between(chunk) - compute.first(chunk)) + compute.last(chunk)


def _arrivals_s(chunk: float, num_ranks: int, cluster: Cluster) -> list[float]:
    """Seconds until the chunk of the 1st, 2nd, ... rank before each rank has arrived, on the slowest link in use."""
    links, steps = cluster.links, range(1, num_ranks)
    if links is None:
        return [0.0 for _ in steps]
    ahead = (1,) if cluster.transfer is Transfer.relay else steps  # distances to the ranks that a rank sends to
    used = [links.between(rank, (rank + each) % num_ranks) for rank in range(num_ranks) for each in ahead]
    num_bytes = chunk * cluster.kv_bytes_per_token
    slowest_s = max((link.seconds(num_bytes) for link in used), default=0.0)
    if cluster.transfer is Transfer.relay:
        return [step * slowest_s for step in steps]
    if not any(link.shared for link in used):
        return [slowest_s for _ in steps]
    busy_s = max(num_bytes / link.bandwidth_Bps for link in used)
    return [(step - 1) * busy_s + slowest_s for step in steps]


def _simulated(ends_s: list[float], last: int, chunk: float, attention_s: list[float], cluster: Cluster) -> Simulated:
    """Make the result: TTFT is when the rank `last`, with the prompt's last token, ends; others may end later."""
    compute, num_ranks = cluster.compute, len(attention_s)
    rest_s = compute.first(chunk) + (compute.num_places - 1) * compute.between(chunk) + _last_s(compute, chunk)
    compute_s = [
        (rest_s + compute.num_places * each_s) / speed
        for each_s, speed in zip(attention_s, cluster.speed, strict=False)
    ]
    sent_bytes = (num_ranks - 1) * chunk * cluster.kv_bytes_per_token * compute.num_places
    idle = [0.0] * (cluster.num_ranks - num_ranks)
    return Simulated(
        ttft_s=ends_s[last],
        compute_s=compute_s + idle,
        wait_s=[max(0.0, end_s - each_s) for end_s, each_s in zip(ends_s, compute_s, strict=True)] + idle,
        sent_bytes=[sent_bytes] * num_ranks + idle,
    )


def check_prompt(num_tokens: int, num_ranks: int, cluster: Cluster) -> None:
    """Check that ranks of a cluster can compute a prompt. Raises: ValueError: no tokens, or more ranks than it has."""
    if num_tokens < 1:
        raise ValueError(f"a prompt of {num_tokens} tokens cannot be simulated")
    if not 1 <= num_ranks <= cluster.num_ranks:
        raise ValueError(f"{num_ranks} ranks were asked for but the cluster has 1 to {cluster.num_ranks}")
