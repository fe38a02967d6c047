"""Runahead: the first token of a long prompt, early, from several GPUs."""

from runahead.config import (
    GenerationOptions,
    ModelOptions,
    PrefillOptions,
    RanksOptions,
)
from runahead.context import ContextPartition, even, from_ratios
from runahead.engine import Engine
from runahead.model import Model
from runahead.ranks import Ranks

__all__ = [
    "ContextPartition",
    "Engine",
    "GenerationOptions",
    "Model",
    "ModelOptions",
    "PrefillOptions",
    "Ranks",
    "RanksOptions",
    "even",
    "from_ratios",
]
