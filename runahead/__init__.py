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
        Positions,
        PrefillOptions,
        RanksOptions,
    )
    from runahead.context import ContextPartition, even, from_ratios
    from runahead.conversation import Conversation, ShardedConversation
    from runahead.decoding.speculative.speculator import Draft
    from runahead.engine import Engine
    from runahead.failures import PeerFailure
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks
    from runahead.report import Generation, GenerationBatch
    from runahead.reuse.prefix_tree import PrefixTree
    from runahead.reuse.store import SegmentStore
    from runahead.thinning.rank_policies import RankPolicies

_HOMES = {
    "CacheOptions": "config",
    "ContextPartition": "context",
    "Conversation": "conversation",
    "DecodeOptions": "config",
    "Draft": "decoding.speculative.speculator",
    "Engine": "engine",
    "Generation": "report",
    "GenerationBatch": "report",
    "GenerationOptions": "config",
    "Model": "model.model",
    "ModelOptions": "config",
    "PeerFailure": "failures",
    "Positions": "config",
    "PrefixTree": "reuse.prefix_tree",
    "PrefillOptions": "config",
    "RankPolicies": "thinning.rank_policies",
    "Ranks": "ranks.ranks",
    "RanksOptions": "config",
    "SegmentStore": "reuse.store",
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
