"""All K,V in host memory, and all of them fetched in every step, each layer while the one before computes.

What FlexGen (Sheng et al., ICML 2023) does with K,V that do not fit on the device, as something to compare with: the
answer is the full cache's, and the link carries all K,V for every token.
"""

# Legend: B batch, N query heads, K kv heads, m chosen slots, C new tokens, H key dim.

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.retriever import Index, PromptView, Retriever, Slots


class NoIndex(Index):
    """Nothing has to be found."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def append(self, k_BKCH: Tensor) -> None:
        self._num_slots += k_BKCH.shape[2]

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor) -> None:
        self._num_slots = slots_BKm.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor) -> None:
        pass

    def fork(self, stored: Callable[[], Tensor]) -> NoIndex:
        return copy.copy(self)


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
