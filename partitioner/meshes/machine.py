"""The machine of a plan: GPUs in nodes, what each sustains, and the links inside a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import WeightBoundCost
from partitioner.cost.link import Link, Links
from partitioner.cost.sparse import cost_of
from partitioner.cost.stage import StageCost
from partitioner.cost.streaming import StreamingCost, Streams
from partitioner.meshes.model_size import STATE_FLOPS, ModelSize
from partitioner.simulation.cluster import Cluster
from runahead.config import PrefillOptions


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """One GPU, or the processors of one rank, with what it sustains of its stated figures.

    Attributes:
        memory_bytes: memory that weights, keys and values, and activations may take.
        matmul_flops, attention_flops: operations per second of matrix products, and of attention under a causal mask.
        memory_Bps: bytes per second of its memory.
        step_s: overhead of each step of a layer, such as launches of kernels.
    """

    name: str
    memory_bytes: int
    matmul_flops: float
    attention_flops: float
    memory_Bps: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`num_gpus` devices in `num_nodes` nodes that are alike.

    Attributes:
        inside: link of every pair of GPUs of a node.
        between: link of one network card; None with one node.
        nics: network cards of a node, which all of its GPUs share.
        measured: compute of the whole model on one device, if it was measured.
        pass_on_as_landed: as in `Cluster`.
    """

    device: PlannedDevice
    num_gpus: int
    num_nodes: int
    inside: Link
    between: Link | None
    nics: int = 1
    measured: ComputeCost | None = None
    pass_on_as_landed: bool = False

    @property
    def per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    def crosses(self, stage: int, num_shares: int) -> bool:
        """Whether a stage and the next one are in two nodes."""
        return stage * num_shares // self.per_node != (stage + 1) * num_shares // self.per_node

    def across(self, num_shares: int) -> Link:
        """Link between two nodes for each of the chains that cross at once, one per share."""
        assert self.between is not None, self
        own = min(1.0, self.nics / num_shares)
        return replace(self.between, bandwidth_Bps=self.between.bandwidth_Bps * own)

    def links(self, num_stages: int, num_shares: int) -> Links:
        """Links of one share's chain through the stages."""
        crossing = [stage for stage in range(num_stages - 1) if self.crosses(stage, num_shares)]
        across = {(stage, stage + 1): self.across(num_shares) for stage in crossing}
        return Links(num_stages, self.inside, across)

    def compute(
        self,
        size: ModelSize,
        num_shares: int,
        batch: int = 1,
        prefill: PrefillOptions | None = None,
        streams: Streams | None = None,
    ) -> ComputeCost:
        """Compute cost of a stage. Measured compute is that of one device, of which a share does its part."""
        share, divisor = self.measured, num_shares
        if share is None:
            share, divisor = counted_cost(size, self.device, num_shares, batch), 1
        share = cost_of(share, prefill or PrefillOptions())
        if streams is not None:
            share = StreamingCost(dense=share, streams=streams)
        if num_shares == 1:
            return share
        return StageCost(
            compute=share,
            divisor=divisor,
            num_shares=num_shares,
            link=self.inside,
            bytes_per_token=batch * size.shape.model_dim * size.item_bytes,
            splits_embeddings=size.splits_embeddings,
        )

    def cluster(
        self,
        size: ModelSize,
        num_stages: int,
        num_shares: int,
        batch: int = 1,
        prefill: PrefillOptions | None = None,
        streams: Streams | None = None,
    ) -> Cluster:
        """One share's chain as a cluster: all chains are alike, so that one of them is simulated."""
        prefill = prefill or PrefillOptions()
        return Cluster(
            compute=self.compute(size, num_shares, batch, prefill, streams),
            speed=[1.0] * num_stages,
            links=self.links(num_stages, num_shares),
            kv_bytes_per_token=batch * size.sent_bytes_per_token(num_shares, prefill.wire_bits),
            state_bytes=batch * size.places.bytes_of_state,
            pass_on_as_landed=self.pass_on_as_landed,
            block=prefill.block,
            streams=streams,
        )


def counted_cost(size: ModelSize, device: PlannedDevice, num_shares: int = 1, batch: int = 1) -> WeightBoundCost:
    """Compute of one share, counted from the model's shape."""
    shape, attention = size.shape, size.attention_weights(num_shares)
    heads = shape.num_heads // num_shares
    cost = WeightBoundCost.from_shape(
        num_layers=len(size.places),
        model_dim=shape.model_dim,
        query_dim=heads * shape.head_dim,
        kv_dim=size.kv_heads(num_shares) * shape.head_dim,
        mlp_dim=max(0.0, size.mlp_dim(num_shares)),
        vocab_size=shape.vocab_size / num_shares,
        matmul_flops=device.matmul_flops,
        attention_flops=device.attention_flops,
        step_s=device.step_s,
        batch=batch,
    )
    # Projections through few dims have fewer weights than their inputs and outputs say; values may have fewer dims.
    fewer = min(1.0, size.active_weights(num_shares) / attention)
    narrower = (shape.head_dim + size.value_dim) / (2 * shape.head_dim)
    state_s = STATE_FLOPS * batch * size.state_numbers / device.attention_flops
    # A weight is read in item_bytes / memory_Bps and multiplied with a token in 2 / matmul_flops.
    read_tokens = device.matmul_flops * size.item_bytes / (2 * device.memory_Bps) / batch
    weight_tokens = read_tokens * size.read_per_active(num_shares)
    rest_s = cost.between_s[1] - cost.first_s[1]  # of a layer after its keys and values, for a token
    last_s = (cost.last_s[0] + (fewer * max(1.0, weight_tokens) - 1) * rest_s, 0.0)
    if len(size.places) - 1 in size.places.states:  # which need all tokens
        last_s = (cost.last_s[0] - rest_s, fewer * rest_s)
    return replace(
        cost,
        first_s=(cost.first_s[0], fewer * cost.first_s[1]),
        between_s=(cost.between_s[0], fewer * cost.between_s[1]),
        last_s=last_s,
        own_s=(*cost.own_s[:2], narrower * cost.own_s[2]),
        prefix_s=(*cost.prefix_s[:3], narrower * cost.prefix_s[3]),
        states=size.places.states,
        state_s=(device.step_s if state_s else 0.0, state_s),
        weight_tokens=weight_tokens,
    )
