"""Prefill strategies, and the table of their names."""

from __future__ import annotations

from runahead.config import PrefillName
from runahead.prefill.base import InterleavedWork, Prefill, Prefilled, PrefillJob, PrefillPlan, PromptBatch
from runahead.prefill.kv_runahead import KVRunahead, OneStage, Single
from runahead.prefill.tsp import TSP
from runahead.prefill.zigzag import Zigzag

PREFILLS: dict[PrefillName, Prefill] = {
    PrefillName.single: Single(),
    PrefillName.kv_runahead: KVRunahead(),
    PrefillName.tsp: TSP(),
    PrefillName.zigzag: Zigzag(),
    PrefillName.tensor: OneStage(),
}

__all__ = ["PREFILLS", "InterleavedWork", "Prefill", "PrefillJob", "PrefillPlan", "Prefilled", "PromptBatch"]
