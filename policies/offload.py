"""Offload: keep all keys and values in host memory and fetch all of them in every step, one layer ahead.

This is what FlexGen (Sheng et al., ICML 2023) does with a KV cache that does not fit on the device, as a baseline: the
answer is that of the full cache, and every new token moves all keys and values over the link.
"""

# Legend: B batch, N query heads, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.options import require_default
from policies.retriever import Choice, Index, Retriever, Slots


class AllSlots(Index):
    """Index that chooses all slots."""

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        return None


@dataclass(kw_only=True)
class Offload(Retriever, name="offload"):
    """Fetch all tokens of a layer while the layer before computes."""

    index_class = AllSlots

    min_tokens: int | None = 0

    compares_by_kv_head: ClassVar[bool] = False
    asks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "with offload, which fetches all tokens; leave it out"
        require_default(self, "fetch", "group", rule=rule)
        require_default(self, "sinks", "recent", given=self.pool.bytes is None, rule=rule)

    def looks_ahead_on(self, device: torch.device) -> bool:
        return True
