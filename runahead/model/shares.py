"""Shares of a model for the ranks of a stage: each has its part of every layer's heads and MLP (tensor parallelism).

The layers are transformers' own with its plan for the family (`tp_plan="auto"`), as its users run it. Two all-reduces
per layer add up the ranks' shares. So each rank stores the keys and values of its heads, all ranks of a stage have the
same hidden states and logits, and they compute in step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from runahead.attention import flash
from runahead.config import ModelOptions, Profile, Weights
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.kernels.operators import KERNELS, take
from runahead.model.adapters import ADAPTERS
from runahead.model.layers.cpu_linear import library
from runahead.model.loading import LoadedWeights
from runahead.model.loading.kernels import library_folder, load_if_built
from runahead.model.loading.sharing import Shares, fitting_shares, splits_heads
from runahead.model.model import Model, load_weights
from runahead.ranks.mesh import one_of
from runahead.ranks.ranks import Ranks
from runahead.timeline.ranges import ranges_for

Load = Callable[..., LoadedWeights]
"""Loads the weights, with more arguments of `load_weights`."""


def check_shares(config: Any, num_shares: int) -> None:
    """Check that a model can be shared out, before its weights are loaded.

    Args:
        config: transformers' config of the text model.

    Raises:
        ValueError: transformers has no plan for the family, or the heads do not divide.
    """
    if num_shares == 1:
        return
    check(Setup(config=config, num_shares=num_shares))
    plan = getattr(config, "base_model_tp_plan", None)
    if config.model_type in ADAPTERS or not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {config.model_type}, so ranks cannot share a model of it; "
            "leave ranks.tensor out, and use another prefill than tensor"
        )
    if not splits_heads(plan):
        return
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    fitting = fitting_shares(heads, kv_heads, plan)
    if num_shares not in fitting:
        raise ValueError(
            f"{heads} heads and {kv_heads} KV heads cannot be shared out to {num_shares} ranks; {one_of(fitting)} "
            "would do for ranks.tensor, or for the number of ranks with prefill=tensor"
        )


def check_arrangement(model: Model, ranks: Ranks, *, in_layers: bool = False) -> None:
    """Check that a model is shared out as the ranks are arranged.

    Args:
        in_layers: each stage has some of the layers, for prefill=pipeline.

    Raises:
        ValueError: it is not.
    """
    if (in_layers and ranks.num_stages > 1) != (model.boundary is not None):
        raise ValueError(
            "prefill=pipeline needs a model of which each rank has some of the layers, and other prefills one that is "
            "whole; see runahead.pipeline.stage.load_stage"
        )
    if model.num_shards != ranks.num_shares:
        raise ValueError(
            f"stages of ranks.tensor={ranks.num_shares} ranks need a model in as many shares, and this one has "
            f"{model.num_shards}; see runahead.model.shares.shard_model"
        )


def load_model(
    options: ModelOptions,
    ranks: Ranks,
    *,
    profile: Profile = Profile.none,
    tokenizer: Any = None,
    make: Callable[[Load], Model] | None = None,
) -> Model:
    """Load a model on all ranks: whole, or its share on each rank where stages have several. Every rank calls this.

    Args:
        profile: profiler for which ranges are named.
        tokenizer: the model's, if this rank has read it.
        make: makes the model of what it loads, if that is neither the whole one nor a share.

    Raises:
        ValueError, OSError: as `Model.load`, `shard_model` and `ranges_for`, on the lowest rank where it fails.
        SharedError: on the other ranks.
    """
    ranges = ranks.on_all_ranks("the profile", lambda: ranges_for(profile))
    lacks_kernels = use_kernels(ranks)
    model = _loaded(options, ranks, tokenizer, make)
    if any(take(shape.dtype, shape.key_dim, shape.value_dim) for shape in model.kv_shapes):
        model.lacks_kernels = lacks_kernels
    tell_unlike(model, ranks)
    ranks.on_all_ranks("the layers", lambda: model.name_ranges(ranges))
    return model


def use_kernels(ranks: Ranks) -> str:
    """Let this process use the kernels for CPUs, if all ranks have them, or a GPU's newest. Every rank calls this.

    The first call decides for all models of the process. So ranks take the same attention, also while a build ends
    between two of them or between two models; on unlike processors it rounds unlike (`tell_unlike`).

    Returns:
        why they are not used, in a sentence; "" if they are, or are not for this device.
    """
    if ranks.device.type == "cuda":
        flash.use_newest(ranks.device)
    if ranks.device.type != "cpu":
        return ""
    own = load_if_built() if KERNELS.lacking is None else KERNELS.lacking
    KERNELS.lacking = next(filter(None, ranks.gather(own, "the kernels")), "")
    KERNELS.in_use = not KERNELS.lacking
    return KERNELS.lacking


def tell_unlike(model: Model, ranks: Ranks) -> None:
    """Warn on rank 0 if CPUs of ranks compute a model by kernels or products that round unlike. All ranks call this."""
    if ranks.device.type != "cpu":
        return
    is_int8 = model.weights is Weights.int8
    uses_kernels = is_int8 or (KERNELS.in_use and model.dtype in (torch.float32, torch.bfloat16))
    told = library_folder().name if uses_kernels else "", "" if is_int8 else library(model.dtype)
    if len(set(ranks.gather(told, "what computes the model"))) > 1 and ranks.rank == 0:
        name = str(model.dtype).removeprefix("torch.")
        warnings.warn(
            f"ranks have kernels or products of unlike processors or versions of torch, so they round {name} "
            "unlike; take hosts of one kind if answers have to be the same on each",
            stacklevel=2,
        )


def _loaded(options: ModelOptions, ranks: Ranks, tokenizer: Any, make: Callable[[Load], Model] | None) -> Model:
    load = partial(
        load_weights,
        options,
        ranks.device,
        progress=ranks.rank == 0,
        ranks_on_host=ranks.local_size,
        tokenizer=tokenizer,
    )
    if make is not None:
        return make(load)
    if ranks.num_shares == 1:
        return ranks.on_all_ranks("the model", lambda: Model.of_weights(load()))
    shares = shares_of(ranks)
    weights = ranks.on_all_ranks("the model", lambda: load(shares=shares))
    model, problem = None, None
    with ranks.announcing_failure():
        try:
            model = Model.of_weights(weights)
        except ValueError as error:  # all ranks find the same, since they have the same logits
            problem = error

    def checked() -> Model:
        if problem is not None:
            raise problem
        assert model is not None
        return model

    return ranks.on_all_ranks("the model", checked)


def shares_of(ranks: Ranks) -> Shares:
    """The ranks of this rank's stage, which share a model. Every rank calls this."""
    with ranks.announcing_failure(), ranks.busy():
        group, hosts = ranks.stage_group(), ranks.stage_hosts()
    run = partial(ranks.collectively, "the other ranks' shares of the layers")
    return Shares(group=group, hosts=hosts, run=run, seal=ranks.seal, device=ranks.stage_device)


def shard_model(model: Model, ranks: Ranks) -> None:
    """Reduce the model to this rank's share of the weights, in place. Every rank calls it with the same whole model.

    Raises:
        ValueError: this model cannot be shared by the ranks of a stage.
        PeerFailure: another rank failed.
    """
    if ranks.num_shares == 1:
        return
    check(Setup(weights=model.weights, num_shares=ranks.num_shares))
    check_shares(model.config, ranks.num_shares)
    shares = shares_of(ranks)
    with ranks.announcing_failure():
        model.shard(shares)


def allreduce_bytes(model: Model, num_tokens: int, num_shares: int, batch: int = 1) -> int:
    """Bytes that the ranks of a stage together send in its all-reduces of these tokens.

    There are two all-reduces of B x S x D activations per layer, after attention and after the MLP. In a ring
    all-reduce of n bytes over t ranks every rank sends 2 (t - 1) / t n bytes, as in the halving algorithms. Not
    counted are the embeddings if a plan splits them, the last token's logits, and what plans with fused projections
    gather.
    """
    activations = batch * num_tokens * int(model.config.hidden_size) * model.dtype.itemsize
    return model.num_layers * 2 * 2 * (num_shares - 1) * activations
