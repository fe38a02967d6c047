"""Tensor parallelism: each rank has a share of every layer's heads and MLP, and computes the whole prompt with it.

The layers are transformers' own with its plan for the family (`tp_plan="auto"`), as its users run it. Two all-reduces
per layer add up the ranks' shares. So each rank stores the keys and values of its heads, all ranks have the same
logits, and all decode in step.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

from runahead.context import ContextPartition, Partitioner
from runahead.model.adapters import ADAPTERS
from runahead.model.model import Model
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.kv_runahead import run_in_chain
from runahead.ranks.ranks import Ranks


class TensorParallel(Prefill):
    """Prefill by tensor parallelism: every rank is a chain of one, with a share of the model."""

    shares_model = True

    def check_config(self, config: Any, num_ranks: int) -> None:
        if num_ranks == 1:
            return
        if config.model_type in ADAPTERS or not getattr(config, "base_model_tp_plan", None):
            raise ValueError(
                f"prefill=tensor: transformers has no tensor-parallel plan for {config.model_type}; use another "
                "prefill, such as prefill=kv_runahead"
            )
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        shared = gcd(heads, kv_heads)
        if shared % num_ranks:
            fitting = max(ranks for ranks in range(1, num_ranks) if shared % ranks == 0)
            remedy = f"--nproc-per-node={fitting} or " if fitting > 1 else ""
            raise ValueError(
                f"prefill=tensor cannot split {heads} heads and {kv_heads} KV heads over {num_ranks} ranks; use "
                f"{remedy}another prefill, such as prefill=kv_runahead"
            )

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return ContextPartition(boundaries=(0, num_tokens))

    def first_token_rank(self, partition: ContextPartition, num_ranks: int) -> int:
        return 0

    def run(self, job: PrefillJob) -> Prefilled:
        return run_in_chain(job, 0)


def shard_model(model: Model, ranks: Ranks) -> None:
    """Reduce the model to this rank's shard of the weights, in place. Every rank calls it with the same whole model.

    Raises:
        ValueError: this model cannot be split over these ranks.
        PeerFailure: another rank failed.
    """
    if ranks.size == 1:
        return
    TensorParallel().check_config(model.config, ranks.size)
    with ranks.announcing_failure():
        with ranks.busy():
            group = ranks.collective_group()
        model.shard(group, partial(ranks.collectively, "the other ranks' shares of the layers"))


def allreduce_bytes(model: Model, num_tokens: int, num_ranks: int, batch: int = 1) -> int:
    """Bytes that all ranks together send in the all-reduces of one prefill.

    There are two all-reduces of B x S x D activations per layer, after attention and after the MLP. In a ring
    all-reduce of n bytes over p ranks every rank sends 2 (p - 1) / p n bytes, as in the halving algorithms. Not
    counted are the embeddings if a plan splits them, the last token's logits, and what plans with fused projections
    gather.
    """
    activations = batch * num_tokens * int(model.config.hidden_size) * model.dtype.itemsize
    return model.num_layers * 2 * 2 * (num_ranks - 1) * activations
