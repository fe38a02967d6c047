"""Adapters for model families that do not use transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from runahead.model.adapters import alibi, falcon, gptj

ADAPTERS: dict[str, tuple[type[Any], str, Callable[..., Any]]] = {
    "bloom": (BloomAttention, "forward", alibi.bloom_forward),
    "codegen": (CodeGenAttention, "_attn", gptj.attend),
    "falcon": (FalconAttention, "forward", falcon.forward),
    "gptj": (GPTJAttention, "_attn", gptj.attend),
    "mpt": (MptAttention, "forward", alibi.mpt_forward),
}
"""Attention class of a family, and function that replaces a method of it and calls ours, by model_type."""


def adapt(model: PreTrainedModel, model_type: str) -> None:
    """Make every attention module of a model call our attention."""
    kind, method, function = ADAPTERS[model_type]
    for module in model.modules():
        if isinstance(module, kind):
            setattr(module, method, MethodType(function, module))
