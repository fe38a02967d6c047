"""Seconds per new token: on the last stage alone, or on all stages, each over the keys and values that it holds.

A step reads the weights and the keys and values once, at the rate of the memory, and waits for its collectives.
"""

from __future__ import annotations

from math import ceil, log2

from partitioner.cost.collectives import allgather_s, allreduce_s
from partitioner.cost.stage import ALLREDUCES
from partitioner.cost.streaming import Streams
from partitioner.meshes.machine import Machine
from partitioner.meshes.model_size import ModelSize
from runahead.context import ContextPartition

STEPS = 2
"""Steps of a layer while decoding, each with its overhead: attention, and what is between two attentions."""

WIDE_BYTES = 4
"""Bytes of a number of attention's output and log-sum-exp when parts are merged."""


def token_s(
    size: ModelSize,
    machine: Machine,
    num_shares: int,
    partition: ContextPartition,
    *,
    sharded: bool,
    batch: int = 1,
    streams: Streams | None = None,
) -> float:
    """Seconds per new token after a prompt that is split over the stages of a mesh, some heads of which may stream.

    Sharded, all stages compute each token, attend to what they hold, and exchange (output, log-sum-exp) in every layer;
    the token is chosen on one rank and told to all.
    """
    shape, device, chain = size.shape, machine.device, partition.chain
    tokens = max(len(partition.chunk(stage)) for stage in chain) if sharded else partition.num_tokens
    kept = tokens if streams is None else streams.kept_tokens(tokens)
    kv = size.num_attending * batch * kept * size.kv_bytes_per_token(num_shares)
    read = size.read_bytes(num_shares, batch) + kv + 2 * batch * shape.state_bytes  # a state is read and written
    layer_s = STEPS * device.step_s
    layer_s += ALLREDUCES * allreduce_s(batch * shape.model_dim * size.item_bytes, num_shares, machine.inside)
    told_s = 0.0
    if sharded and len(chain) > 1:
        crosses = any(machine.crosses(stage, num_shares) for stage in range(chain[-1]))
        link = machine.across(num_shares) if crosses else machine.inside
        part = batch * shape.num_heads // num_shares * (shape.head_dim + 1) * WIDE_BYTES
        layer_s += device.step_s + allgather_s(part, len(chain), link)
        told_s = ceil(log2(len(chain))) * link.latency_s
    return read / device.memory_Bps + len(size.places) * layer_s + told_s
