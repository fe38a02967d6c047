"""Prefill strategies, and the table of their names."""

from __future__ import annotations

from runahead.config import PrefillName, Table
from runahead.prefill.base import InterleavedWork, Prefill, Prefilled, PrefillJob, PrefillPlan, PromptBatch

PREFILLS: Table[PrefillName, type[Prefill]] = Table(
    {
        PrefillName.single: "runahead.prefill.kv_runahead:Single",
        PrefillName.kv_runahead: "runahead.prefill.kv_runahead:KVRunahead",
        PrefillName.tsp: "runahead.prefill.tsp:TSP",
        PrefillName.zigzag: "runahead.prefill.zigzag:Zigzag",
        PrefillName.tensor: "runahead.prefill.kv_runahead:OneStage",
        PrefillName.pipeline: "runahead.pipeline.prefill:Pipeline",
    }
)

__all__ = ["PREFILLS", "InterleavedWork", "Prefill", "PrefillJob", "PrefillPlan", "Prefilled", "PromptBatch"]
