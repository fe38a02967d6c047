"""All K,V in host memory, and all of them fetched in every step, each layer while the one before computes.

What FlexGen (Sheng et al., ICML 2023) does with K,V that do not fit on the device, as something to compare with: the
answer is the full cache's, and the link carries all K,V for every token.
"""

# Legend: B batch, N query heads, K kv heads, m chosen slots, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.retriever import Index, NoIndex, PromptView, Retriever, Slots


@dataclass(kw_only=True)
class Offload(Retriever):
    """Everything, ahead of time."""

    min_tokens: int | None = 0

    looks_ahead: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    def index(self, view: PromptView) -> NoIndex:
        return NoIndex(view.k_BKnH.shape[2])

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Tensor | None:
        return None
