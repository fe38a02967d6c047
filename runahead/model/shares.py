"""Shares of a model for the ranks of a stage: each has its part of every layer's heads and MLP (tensor parallelism).

The layers are transformers' own with its plan for the family (`tp_plan="auto"`), as its users run it. Two all-reduces
per layer add up the ranks' shares. So each rank stores the keys and values of its heads, all ranks of a stage have the
same hidden states and logits, and they compute in step.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

from runahead.config import ModelOptions
from runahead.model.adapters import ADAPTERS
from runahead.model.model import Model
from runahead.ranks.mesh import one_of
from runahead.ranks.ranks import Ranks


def check_shares(config: Any, num_shares: int) -> None:
    """Check that a model can be shared out, before its weights are loaded.

    Args:
        config: transformers' config of the text model.

    Raises:
        ValueError: transformers has no plan for the family, or the heads do not divide.
    """
    if num_shares == 1:
        return
    if config.model_type in ADAPTERS or not getattr(config, "base_model_tp_plan", None):
        raise ValueError(
            f"transformers has no tensor-parallel plan for {config.model_type}, so ranks cannot share a model of it; "
            "leave ranks.tensor out, and use another prefill than tensor"
        )
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    shared = gcd(heads, kv_heads)
    if shared % num_shares:
        fitting = one_of([shares for shares in range(1, shared + 1) if shared % shares == 0])
        raise ValueError(
            f"{heads} heads and {kv_heads} KV heads cannot be shared out to {num_shares} ranks; {fitting} would do for "
            "ranks.tensor, or for the number of ranks with prefill=tensor"
        )


def load_model(options: ModelOptions, ranks: Ranks) -> Model:
    """Load a model on all ranks: whole, or its share on each rank where stages have several. Every rank calls this.

    Raises:
        ValueError, OSError: as `Model.load` and `shard_model`, on the lowest rank where it fails.
        SharedError: on the other ranks.
    """
    model = ranks.on_all_ranks(
        "the model",
        lambda: Model.load(options, ranks.device, progress=ranks.rank == 0, ranks_on_host=ranks.local_size),
    )
    shard_model(model, ranks)
    return model


def shard_model(model: Model, ranks: Ranks) -> None:
    """Reduce the model to this rank's share of the weights, in place. Every rank calls it with the same whole model.

    Raises:
        ValueError: this model cannot be shared by the ranks of a stage.
        PeerFailure: another rank failed.
    """
    if ranks.num_shares == 1:
        return
    check_shares(model.config, ranks.num_shares)
    with ranks.announcing_failure():
        with ranks.busy():
            group = ranks.stage_group()
        model.shard(group, partial(ranks.collectively, "the other ranks' shares of the layers"))


def allreduce_bytes(model: Model, num_tokens: int, num_shares: int, batch: int = 1) -> int:
    """Bytes that the ranks of a stage together send in its all-reduces of these tokens.

    There are two all-reduces of B x S x D activations per layer, after attention and after the MLP. In a ring
    all-reduce of n bytes over t ranks every rank sends 2 (t - 1) / t n bytes, as in the halving algorithms. Not
    counted are the embeddings if a plan splits them, the last token's logits, and what plans with fused projections
    gather.
    """
    activations = batch * num_tokens * int(model.config.hidden_size) * model.dtype.itemsize
    return model.num_layers * 2 * 2 * (num_shares - 1) * activations
