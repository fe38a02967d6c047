"""Model families that do not use transformers' attention interface, or that transformers has no code of."""

from __future__ import annotations

from pkgutil import resolve_name
from types import MethodType

from transformers import PreTrainedModel

ADAPTERS = {
    "bloom": ("BloomAttention", "forward", "alibi:bloom_forward"),
    "codegen": ("CodeGenAttention", "_attn", "gptj:attend"),
    "falcon": ("FalconAttention", "forward", "falcon:forward"),
    "gptj": ("GPTJAttention", "_attn", "gptj:attend"),
    "mpt": ("MptAttention", "forward", "alibi:mpt_forward"),
}
"""Attention class of a family, and function of this folder that replaces a method of it and calls ours, by model_type.
They are imported for a model of the family."""


OWN_FORMS = {"lckv-llama": "runahead.model.adapters.lckv:register"}
"""Functions that register families which transformers has no code of, by model_type."""


def know(model_type: object) -> None:
    """Register a family with transformers if it is one of `OWN_FORMS`."""
    if isinstance(model_type, str) and model_type in OWN_FORMS:
        resolve_name(OWN_FORMS[model_type])()


def adapt(model: PreTrainedModel, model_type: str) -> None:
    """Make every attention module of a model call our attention."""
    family, method, place = ADAPTERS[model_type]
    kind = resolve_name(f"transformers.models.{model_type}.modeling_{model_type}:{family}")
    function = resolve_name(f"{__name__}.{place}")
    for module in model.modules():
        if isinstance(module, kind):
            setattr(module, method, MethodType(function, module))
