"""Clusters to plan for: the paper's, and random ones of unlike ranks and links."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link, Links
from partitioner.simulation.cluster import Cluster
from runahead.config import Transfer
from tests.partitions import boundaries

LLAMA_KV_BYTES = 2 * 4096 * 2
"""Bytes of a token in one layer of Llama 7B, in half precision."""


def llama(**changes: Any) -> FittedCost:
    """Llama 7B on something like an A100."""
    shape: dict[str, Any] = {
        "num_layers": 32,
        "model_dim": 4096,
        "kv_dim": 4096,
        "mlp_dim": 11008,
        "vocab_size": 32000,
        "matmul_flops": 200e12,
        "attention_flops": 120e12,
        "step_s": 20e-6,
    }
    return FittedCost.from_shape(**(shape | changes))


def rank_s(cost: ComputeCost, c: float, P: float, *, is_last: bool) -> float:
    """Seconds of all that one rank computes: ranks before the last stop once the last layer's K,V or state is known."""
    num_attended = cost.num_places if is_last else cost.num_places - 1
    held = len([layer for layer in cost.states if layer < cost.num_places - 1 or is_last])
    attention_s = (num_attended - held) * (cost.own(c) + cost.prefix(c, P)) + len(cost.states) * cost.state(c, P)
    return cost.first(c) + (cost.num_places - 1) * cost.between(c) + attention_s + (cost.last(c) if is_last else 0.0)


def llama_cluster(num_ranks: int, GBps: float | None, **changes: Any) -> Cluster:
    """The paper's machine with links of so many 1e9 bytes per second; None for free communication."""
    links = None if GBps is None else Links(num_ranks, Link.from_GBps(GBps, latency_s=10e-6))
    values: dict[str, Any] = {
        "compute": llama(),
        "speed": [1.0] * num_ranks,
        "links": links,
        "kv_bytes_per_token": LLAMA_KV_BYTES,
    }
    return Cluster(**(values | changes))


def random_cluster(rng: random.Random, num_ranks: int, num_layers: int) -> Cluster:
    """Ranks and links of different speeds; on some, communication is nothing, on some it is nearly all."""
    flops = 10 ** rng.uniform(13.5, 14.5)
    compute = llama(
        num_layers=num_layers,
        kv_dim=rng.choice([512, 4096]),
        matmul_flops=flops,
        attention_flops=flops * rng.uniform(0.1, 1),
        step_s=rng.uniform(0, 1e-4),
    )
    bandwidth = 10 ** rng.uniform(9, 11.5)
    pairs = [(i, j) for i in range(num_ranks) for j in range(i + 1, num_ranks)]
    overrides = {
        pair: Link(latency_s=1e-5, bandwidth_Bps=bandwidth * rng.uniform(0.3, 1))
        for pair in pairs
        if rng.random() < 0.5
    }
    default = Link(latency_s=rng.uniform(0, 5e-5), bandwidth_Bps=bandwidth, shared=rng.random() < 0.3)
    return Cluster(
        compute=compute,
        speed=[rng.uniform(0.4, 1) for _ in range(num_ranks)],
        links=Links(num_ranks, default, overrides),
        kv_bytes_per_token=rng.choice([2048, LLAMA_KV_BYTES]),
        transfer=rng.choice(list(Transfer)),
        layers_in_flight=rng.choice([2, 3, 4]),
    )


def random_clusters(num_ranks: int, max_layers: int = 6) -> st.SearchStrategy[Cluster]:
    seeds, layers = st.integers(0, 10**6), st.integers(1, max_layers)
    return st.builds(lambda seed, depth: random_cluster(random.Random(seed), num_ranks, depth), seeds, layers)


def hybrid(cluster: Cluster, rng: random.Random) -> Cluster:
    """The same cluster with a model some of whose layers, maybe all, hold a state in place of keys and values."""
    compute = cluster.compute
    assert isinstance(compute, FittedCost)
    states = [layer for layer in range(compute.num_places) if rng.random() < 0.7]
    token_s = compute.between_s[1] * rng.uniform(0.05, 1)
    return replace(
        cluster,
        compute=replace(
            compute,
            states=tuple(states),
            state_s=(rng.uniform(0, 1e-4), token_s),
            later_s=rng.choice([(), (0.0, 5 * token_s)]),
        ),
        state_bytes=rng.choice([1e3, 1e7]),
    )


def random_hybrids(num_ranks: int, max_layers: int = 6) -> st.SearchStrategy[Cluster]:
    seeds = st.integers(0, 10**6)
    return st.builds(
        lambda each, seed: hybrid(each, random.Random(seed)), random_clusters(num_ranks, max_layers), seeds
    )


def interleaved(num_ranks: int, *, period: int, num_layers: int = 24, **changes: Any) -> Cluster:
    """Llama 7B's widths on links that cost nothing; of `period` layers the last attends, the others hold a state."""
    compute = llama(num_layers=num_layers, attention_flops=20e12, **changes)
    states = tuple(layer for layer in range(num_layers) if layer % period != period - 1)
    compute = replace(compute, states=states, state_s=(0.0, 0.2 * compute.between_s[1]))
    return llama_cluster(num_ranks, None, compute=compute, state_bytes=1e6)


def states_first(num_ranks: int) -> Cluster:
    """A cluster as of `interleaved`, with all states in the first half of the layers and attention in the second."""
    cluster = interleaved(num_ranks, period=2)
    assert isinstance(cluster.compute, FittedCost)
    return replace(cluster, compute=replace(cluster.compute, states=tuple(range(12))))


def partitions(num_ranks: int, num_tokens: int = 4096) -> st.SearchStrategy[tuple[int, ...]]:
    """Boundaries, many of them with empty chunks and chunks of one token."""
    return boundaries(num_tokens, num_ranks)
