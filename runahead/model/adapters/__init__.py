"""Adapters for model families that do not use transformers' attention interface, one file each."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from runahead.model.adapters import bloom, falcon, gptj, mpt

ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {
    "bloom": bloom.adapt,
    "codegen": gptj.adapt,
    "falcon": falcon.adapt,
    "gptj": gptj.adapt,
    "mpt": mpt.adapt,
}
"""Functions that make a model call our attention, by model_type."""
