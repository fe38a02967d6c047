"""The first layers of a model as a model of its own, with its embeddings, last norm and output layer.

It has the weights of the whole model, in the same memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter
from transformers import PreTrainedModel

from runahead.config import Fuse
from runahead.model.layer_kinds import decoder_config
from runahead.model.layers.fusing import is_fused
from runahead.model.loading.hf import build_with_attention
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.model import Model
from runahead.model.seam import ATTENTION_NAME


def first_layers(model: Model, num_layers: int) -> Model:
    """The first layers of a model.

    Args:
        model: with a list of layers that each store keys and values of their own, and plain weights.

    Raises:
        ValueError: it has not so many layers, or cannot be made of some of them.
    """
    of_all = model.num_layers
    if not 1 <= num_layers < of_all:
        raise ValueError(
            f"prefill.speculative_layers={num_layers} must be from 1 to {of_all - 1}: model {model.name} has {of_all} "
            "layers"
        )
    try:
        module = _cut(model.module, num_layers, of_all)
    except Exception as error:  # of the family's own code
        raise ValueError(
            f"no model can be made of the first layers of {model.family} ({one_line(error)}); use "
            "prefill.speculative=model"
        ) from error
    fuse = Fuse.auto if is_fused(model.module) else Fuse.off
    name = f"the first {num_layers} layers of {model.name}"
    # Mapped weights are never moved, nor are those that another model has.
    return Model(module, model.tokenizer, name=name, fuse=fuse, is_mapped=True)


def _cut(module: PreTrainedModel, num_layers: int, of_all: int) -> PreTrainedModel:
    """A module of the same class with fewer layers, over the same tensors."""
    config = copy.deepcopy(module.config)
    own = decoder_config(config)
    for name, value in vars(own).items():
        if isinstance(value, list) and len(value) == of_all:  # of each layer one
            setattr(own, name, value[:num_layers])
    own.num_hidden_layers = num_layers

    def build(attention: str) -> PreTrainedModel:
        config._attn_implementation = attention
        with torch.device("meta"):
            return type(module)(config)

    with quiet():
        made: PreTrainedModel = build_with_attention(build, ATTENTION_NAME)
    known: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    known |= dict(module.named_buffers(remove_duplicate=False))
    for name, child in made.named_modules():
        for tensors in (child._parameters, child._buffers):
            for own_name, tensor in tensors.items():
                if tensor is not None:
                    tensors[own_name] = _same(tensor, known[f"{name}.{own_name}" if name else own_name])
    made.generation_config = module.generation_config
    return made.eval()


def _same(like: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    if like.shape != given.shape:
        raise ValueError(f"weights have the shapes {tuple(given.shape)} and {tuple(like.shape)}")
    return Parameter(given.detach(), requires_grad=False) if isinstance(like, nn.Parameter) else given
