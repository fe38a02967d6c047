"""Tensor parallelism, the other way to use several ranks: each has a share of every layer's heads and MLP.

The layers are transformers' own with its plan for the family (`tp_plan="auto"`), as its users run it. Every rank
computes the whole prompt with its share, and two all-reduces per layer add the shares up. So each rank keeps the K,V of
its heads, all have the same logits, and all decode in step.
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
    """Every rank is a chain of its own, with a share of the model."""

    shares_model = True

    def check_config(self, config: Any, num_ranks: int) -> None:
        if num_ranks > 1:
            _check_plan(config)
            _check_heads(config, num_ranks)

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return ContextPartition(boundaries=(0, num_tokens))

    def first_token_rank(self, partition: ContextPartition, num_ranks: int) -> int:
        return 0

    def run(self, job: PrefillJob) -> Prefilled:
        return run_in_chain(job, 0)


def shard_model(model: Model, ranks: Ranks) -> None:
    """Leave every rank its share of the model, in place. Every rank calls it with the same whole model.

    Raises:
        ValueError: this model cannot be shared out over these ranks.
        PeerFailure: another rank failed.
    """
    if ranks.size == 1:
        return
    _check_plan(model.config)
    _check_heads(model.config, ranks.size)
    with ranks.announcing_failure():
        with ranks.busy():
            group = ranks.collective_group()
        model.shard(group, partial(ranks.collectively, "the other ranks' shares of the layers"))


def allreduce_bytes(model: Model, num_tokens: int, num_ranks: int, batch: int = 1) -> int:
    """Bytes that all ranks together send to add up their shares in one prefill.

    Two all-reduces per layer, behind attention and behind the MLP, of B x S x D activations. A ring all-reduce of n
    bytes over p ranks lets every rank send 2 (p - 1) / p n of them; so do the halving algorithms. Not counted: the
    embeddings where a plan shares them out, the last token's logits, and what plans with fused projections gather.
    """
    activations = batch * num_tokens * int(model.config.hidden_size) * model.dtype.itemsize
    return model.num_layers * 2 * 2 * (num_ranks - 1) * activations


def _check_plan(config: Any) -> None:
    if config.model_type in ADAPTERS or not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"prefill=tensor: transformers has no tensor-parallel plan for {config.model_type}; use another prefill, "
            "such as prefill=kv_runahead"
        )


def _check_heads(config: Any, num_ranks: int) -> None:
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    shared = gcd(heads, kv_heads)
    if shared % num_ranks:
        fitting = max(ranks for ranks in range(1, num_ranks) if shared % ranks == 0)
        remedy = f"--nproc-per-node={fitting} or " if fitting > 1 else ""
        raise ValueError(
            f"prefill=tensor cannot share {heads} heads and {kv_heads} K,V heads out over {num_ranks} ranks; use "
            f"{remedy}another prefill, such as prefill=kv_runahead"
        )
