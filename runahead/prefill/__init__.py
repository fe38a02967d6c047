"""Ways to fill the KV cache, one file each."""

from __future__ import annotations

from runahead.config import PrefillName
from runahead.prefill.base import Prefill, Prefilled, PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import KVRunahead
from runahead.prefill.single import Single

PREFILLS: dict[PrefillName, Prefill] = {
    PrefillName.single: Single(),
    PrefillName.kv_runahead: KVRunahead(),
}

__all__ = ["PREFILLS", "Prefill", "PrefillJob", "Prefilled", "PromptBatch"]
