"""Ways to fill the KV cache, one file each."""

from __future__ import annotations

from collections.abc import Callable

from runahead.config import PrefillName
from runahead.context import Partitioner
from runahead.prefill import kv_runahead, single
from runahead.prefill.base import Prefilled, PrefillJob, PromptBatch

PREFILLS: dict[PrefillName, Callable[[PrefillJob], Prefilled]] = {
    PrefillName.single: kv_runahead.prefill,  # a chain of one rank
    PrefillName.kv_runahead: kv_runahead.prefill,
}
"""Strategy -> this rank's part of it."""

OWN_PARTITIONS: dict[PrefillName, Partitioner] = {PrefillName.single: single.partition}
"""Strategies that leave no choice of the partition."""

__all__ = ["OWN_PARTITIONS", "PREFILLS", "PrefillJob", "Prefilled", "PromptBatch"]
