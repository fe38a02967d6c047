"""Runahead: the first token of a long prompt, early, from several GPUs."""

# ruff: noqa: F401 (names for type checkers; `__getattr__` imports them)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runahead.config import (
        CacheOptions,
        DecodeOptions,
        GenerationOptions,
        ModelOptions,
        PrefillOptions,
        RanksOptions,
    )
    from runahead.context import ContextPartition, even, from_ratios
    from runahead.conversation import Conversation, ShardedConversation
    from runahead.engine import Engine
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

_HOMES = {
    "CacheOptions": "config",
    "ContextPartition": "context",
    "Conversation": "conversation",
    "DecodeOptions": "config",
    "Engine": "engine",
    "GenerationOptions": "config",
    "Model": "model.model",
    "ModelOptions": "config",
    "PrefillOptions": "config",
    "Ranks": "ranks.ranks",
    "RanksOptions": "config",
    "ShardedConversation": "conversation",
    "even": "context",
    "from_ratios": "context",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Imported when first used: a command line that only prints its help should not load torch and transformers."""
    if name in _HOMES:
        return getattr(import_module(f"runahead.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'runahead' has no attribute '{name}'")
