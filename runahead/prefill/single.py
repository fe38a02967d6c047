"""Prefill on one rank: the last one computes the whole prompt, the others stay idle."""

from __future__ import annotations

from runahead.context import ContextPartition


def partition(num_tokens: int, num_ranks: int) -> ContextPartition:
    """All tokens on the last rank."""
    return ContextPartition(boundaries=(0,) * num_ranks + (num_tokens,))
