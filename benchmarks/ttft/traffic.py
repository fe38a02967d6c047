"""Bytes that ranks send: by the paper's formulas, and by the counters of network cards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import psutil

from benchmarks.ttft.variants import Traffic
from partitioner.simulation.bounds import chain_tokens, streamed_tokens, tsp_tokens
from policies.base import Policy
from runahead.cache.quantised.wire import sent_shape
from runahead.cache.slabs import KVShape
from runahead.context import ContextPartition, even
from runahead.model.model import Model
from runahead.model.shares import allreduce_bytes
from runahead.prefill.base import streaming_of
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies

CARDS_SETTLE_S = 0.05
"""Seconds after a run until its last packets are in a network card's counter."""


def kv_bytes_per_token(shapes: Sequence[KVShape], wire_bits: int | None = None) -> int:
    """KV cache bytes of one token in one row: 2 x KV heads x head dim x item size x layers if all layers are alike.

    Args:
        wire_bits: as `prefill.wire_bits`, of a token that is sent.
    """
    return sum(sent_shape(shape, wire_bits).bytes_per_token() for shape in shapes)


def formula_bytes(
    traffic: Traffic,
    partition: ContextPartition,
    model: Model,
    policies: Sequence[Policy] = (),
    *,
    wire_bits: int | None = None,
) -> int:
    """Bytes that all ranks together send for one prompt: keys and values, or hidden states in tensor parallelism.

    Layers with a sliding window send less than a chain's formula says.

    Args:
        wire_bits: as `prefill.wire_bits`.
    """
    num_tokens, num_ranks = partition.num_tokens, partition.num_ranks
    if traffic is Traffic.passed:
        return (num_ranks - 1) * num_tokens * int(model.config.hidden_size) * model.dtype.itemsize
    if traffic is Traffic.activations:
        return allreduce_bytes(model, num_tokens, num_ranks)
    # Each stage but the last hands on the state of every layer that holds one.
    states = (len(partition.chain) - 1) * sum(shape.num_bytes for shape in model.state_shapes)
    if traffic is Traffic.streamed:
        return states + streamed_bytes(policies, partition, model, wire_bits)
    tokens = [0] * model.num_layers
    if traffic is Traffic.chain:
        tokens = [chain_tokens(partition)] * model.num_layers
    elif traffic is Traffic.gathered:
        tokens = [tsp_tokens(num_tokens, num_ranks)] * model.num_layers
    elif traffic is Traffic.wanted:
        last = model.num_layers - 1
        tokens = [wanted_zigzag_tokens(num_tokens, num_ranks, in_last_layer=n == last) for n in range(model.num_layers)]
    elif traffic is Traffic.narrowed:
        tokens = narrowed_tokens(policies, partition, model.num_layers)
    sent = [sent_shape(shape, wire_bits).bytes_per_token() for shape in model.kv_shapes]
    return states + sum(each * per_token for each, per_token in zip(tokens, sent, strict=True))


def wanted_zigzag_tokens(num_tokens: int, num_ranks: int, *, in_last_layer: bool) -> int:
    """Tokens whose keys and values are sent in one layer if each rank receives only those that it needs.

    Rank i has chunks p - 1 - i and p + i of 2p. Every other rank needs the early one, only later ranks need the late
    one; in the last layer only the last rank, which has the prompt's end, needs any.
    """
    p, chunks = num_ranks, even(num_tokens, 2 * num_ranks).chunk_lengths
    early, late = chunks[p - 1 :: -1], chunks[p:]
    if in_last_layer:
        return num_tokens - early[-1] - late[-1]
    return (p - 1) * sum(early) + sum((p - 1 - rank) * length for rank, length in enumerate(late))


def streamed_bytes(policies: Sequence[Policy], partition: ContextPartition, model: Model, wire_bits: int | None) -> int:
    """Bytes of keys and values that ranks send of one prompt; heads that stream need the first and the last tokens."""
    rank_policies = RankPolicies(last=list(policies))
    rank_policies.read_files(model)
    streaming = streaming_of(rank_policies, model, num_tokens=partition.num_tokens, pads=[0])
    few, total = streamed_tokens(partition, streaming.sinks + streaming.window - 1), 0
    for number, shape in enumerate(model.kv_shapes):
        of_head = sent_shape(replace(shape, num_kv_heads=1), wire_bits).bytes_per_token()
        exact, streamed = len(streaming.exact[number]), len(streaming.streamed[number])
        total += of_head * (exact * chain_tokens(partition) + streamed * few)
    return total


def narrowed_tokens(policies: Sequence[Policy], partition: ContextPartition, num_layers: int) -> list[int]:
    """Tokens sent in each layer: every rank but the last passes on what is kept of its own and all earlier chunks."""
    left = RankPolicies.everywhere(policies).by_layer(partition, num_layers)
    return [chain_tokens(each) for each in left]


def wire_bytes(ranks: Ranks) -> int | None:
    """Bytes that this host's network cards have sent since it started, headers included; loopback does not count.

    None if this rank is not alone on its host, since the others would be counted too.
    """
    if ranks.size == 1 or ranks.local_size > 1:
        return None
    ranks.barrier("the network to be quiet")
    time.sleep(CARDS_SETTLE_S)
    counters = psutil.net_io_counters(pernic=True)
    return sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")
