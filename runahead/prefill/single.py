"""Prefill on one rank: the last rank computes the whole prompt, the others stay idle."""

from __future__ import annotations

from runahead.context import ContextPartition, Partitioner
from runahead.prefill.kv_runahead import KVRunahead


class Single(KVRunahead):
    """Prefill by a chain of one rank."""

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return ContextPartition(boundaries=(0,) * num_ranks + (num_tokens,))
