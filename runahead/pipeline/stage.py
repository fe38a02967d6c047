"""A stage of a pipeline: a model of some of the layers, whose first one is given what the stage before computed.

Its module is transformers' own with the other layers taken out, so all that knows of models (attention, caches,
decoding) works on it as on a shorter one. Embeddings, last norm and head stay in every stage; the first and the last
one use them.
"""

# Legend: B batch, C new tokens, D model dim.

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runahead.attention.base import ForwardEndsHere, Recording
from runahead.cache.attention import CausalAttention
from runahead.config import ModelOptions, Profile
from runahead.context import even
from runahead.model.checks.logits_check import check_text, differ, routes_to_experts, transformers_logits
from runahead.model.layer_kinds import decoder_config
from runahead.model.model import Model
from runahead.model.seam import SeamCache
from runahead.model.shares import Load, load_model
from runahead.pipeline.hidden import Boundary
from runahead.ranks.ranks import Ranks


def load_stage(options: ModelOptions, ranks: Ranks, *, profile: Profile = Profile.none, tokenizer: Any = None) -> Model:
    """Load this rank's stage of a model; a single rank has all of it. Every rank calls this.

    Args:
        profile, tokenizer: as of `load_model`.

    Raises:
        ValueError, OSError: as `load_model`, or the stages together give other logits than the whole model.
        SharedError: on the other ranks.
    """

    def make(load: Load) -> Model:
        stage = Stage(ranks)
        weights = ranks.on_all_ranks("the model", lambda: load(keep=stage.keep))
        # What late layers make of embeddings is mostly rounding in 16 bits, so these are compared together alone.
        compares = weights.dtype.itemsize >= 4 or not stage.tells_together(weights.dtype)
        model = ranks.on_all_ranks("the model", lambda: Model.of_weights(weights, compares=compares))
        stage.join(model)
        return model

    return load_model(options, ranks, profile=profile, tokenizer=tokenizer, make=make if ranks.size > 1 else None)


class Stage:
    """This rank's stage of a model that is about to be loaded: `keep` its layers, then `join` the other stages."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._expected_1V = ranks, torch.empty(0)
        self._is_last, self._has_experts = ranks.stage == ranks.num_stages - 1, False

    def keep(self, module: PreTrainedModel) -> None:
        """Take out the layers of other stages.

        The last stage computes the logits of a short text by the whole model first, which its own are compared with.

        Raises:
            ValueError: there are fewer layers than stages, or no list of layers.
        """
        module.eval()
        self._has_experts = routes_to_experts(module)
        config, num_stages = decoder_config(module.config), self._ranks.num_stages
        if num_stages == 1:
            return
        num_layers = int(config.num_hidden_layers)
        if num_layers < num_stages:
            raise ValueError(
                f"prefill=pipeline gives each of {num_stages} ranks some of the model's layers, and it has "
                f"{num_layers}; use at most {num_layers} ranks"
            )
        if self._is_last:
            ids_1C = check_text(int(config.vocab_size), module.device)
            self._expected_1V = transformers_logits(module, ids_1C, lambda call: call())
        keep_layers(module, even(num_layers, num_stages).chunk(self._ranks.stage))

    def tells_together(self, dtype: torch.dtype) -> bool:
        """Whether the logits of all stages together tell a mistake: in 16 bits rounding exchanges experts of any stage.

        Where they do not, each stage is compared alone, which looks at the attention of its layers.
        """
        return dtype.itemsize >= 4 or not self._has_experts

    def join(self, model: Model) -> None:
        """Let the model's forwards begin and end at other stages, and compare the logits of the short text.

        Raises:
            ValueError: they are others than the whole model's.
        """
        ranks = self._ranks
        if ranks.num_stages == 1:
            return
        model.boundary = boundary = Boundary(ranks, width=int(model.config.hidden_size), dtype=model.dtype)
        link(model, boundary)
        ids_1C, off = check_text(model.vocab_size, model.device), ""
        attention = CausalAttention(model.empty_cache(ids_1C.shape[1]), start=0, pads=[0])
        with ranks.announcing_failure(), suppress(ForwardEndsHere):
            logits_1V = model.forward(ids_1C, attention, start=0, pads=[0])
            if self.tells_together(model.dtype):
                off = differ(logits_1V, self._expected_1V.to(logits_1V.device), model.dtype)
        off = next(filter(None, ranks.gather(off, "the logits of all stages")), "")
        if off:
            raise ValueError(
                f"{model.family} gives other logits where ranks have some of its layers ({off}); use "
                "prefill=kv_runahead"
            )


def keep_layers(module: PreTrainedModel, layers: range) -> None:
    """Take all other decoder layers out of a model, whose config and layers count those that are left from 0.

    Raises:
        ValueError: the model has no list of its layers.
    """
    config = decoder_config(module.config)
    number = int(config.num_hidden_layers)
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == number
    ]
    if not places:
        raise ValueError(
            f"{type(module).__name__} has no list of its {number} layers, so ranks cannot have some of them; use "
            "prefill=kv_runahead"
        )
    parent, name = places[0]
    kept = list(getattr(parent, name))[layers.start : layers.stop]
    setattr(parent, name, nn.ModuleList(kept))
    for at, layer in enumerate(kept):
        for child in layer.modules():
            if isinstance(vars(child).get("layer_idx"), int):
                child.layer_idx = at
    by_layer = {each: value for each, value in vars(config).items() if "layer" in each and _is_list(value, number)}
    for each, value in by_layer.items():
        setattr(config, each, value[layers.start : layers.stop])
    config.num_hidden_layers = len(layers)
    if hasattr(module.config, "decoder_layers"):  # beside an encoder, where `config` is a copy
        module.config.decoder_layers = len(layers)


def link(model: Model, boundary: Boundary) -> None:
    """Let the first layer take what it is given from the stage before, and the last one hand on what it returns."""
    layers = model.decoder_layers
    layers[0].register_forward_pre_hook(partial(_receive, boundary), with_kwargs=True, prepend=True)
    if not boundary.is_last:
        layers[-1].register_forward_hook(partial(_send, boundary), with_kwargs=True)


def _is_list(value: Any, number: int) -> bool:
    return isinstance(value, list) and len(value) == number


def _passing(boundary: Boundary, args: tuple[Any, ...], keywords: dict[str, Any]) -> SeamCache | None:
    """The forward of all stages in which a layer is called; None by transformers' own attention, or to look at it."""
    seam = None if boundary.is_closed else SeamCache.among(args, keywords)
    return None if seam is None or isinstance(seam.attention, Recording) else seam


def _receive(
    boundary: Boundary, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any] | None:
    seam = _passing(boundary, args, keywords)
    if seam is None:
        return None
    given_BCD = boundary.receive(args[0] if args else keywords["hidden_states"], seam.start)
    if args:
        return (given_BCD, *args[1:]), keywords
    return args, keywords | {"hidden_states": given_BCD}


def _send(boundary: Boundary, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
    if _passing(boundary, args, keywords) is not None:
        x_BCD: Tensor = output[0] if isinstance(output, tuple) else output
        boundary.send(x_BCD)
        raise ForwardEndsHere
