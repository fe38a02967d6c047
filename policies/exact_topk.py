"""The tokens with the highest scores, by all keys: what a retrieving policy could at best find.

Reads every key in every step, where it lies, so it shows how much there is to see, not how fast it can be found.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, C new tokens, H key dim.

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Budget
from policies.retriever import Index, PromptView, Retriever, Slots, most_needed, relative_need


class StoredKeys(Index):
    """The keys of the pool."""

    def __init__(self, stored: Callable[[], Tensor], num_slots: int, scaling: float) -> None:
        self._stored, self._num_slots, self._scaling = stored, num_slots, scaling

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

    def fork(self, stored: Callable[[], Tensor]) -> StoredKeys:
        other = copy.copy(self)
        other._stored = stored
        return other

    def scores(self, q_BNH: Tensor) -> Tensor:
        """(B, K, G, n), scaled, in at least float32."""
        k_BKnH = self._stored()
        scores_BKGn = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * self._scaling @ k_BKnH.transpose(-1, -2)
        return scores_BKGn.to(torch.promote_types(scores_BKGn.dtype, torch.float32))


@dataclass(kw_only=True)
class ExactTopK(Retriever):
    """`fetch` slots of every KV head, by the layer's own query."""

    fetch: Budget | None = 0.1

    def index(self, view: PromptView) -> StoredKeys:
        return StoredKeys(view.stored, view.k_BKnH.shape[2], view.scaling)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Tensor | None:
        assert isinstance(index, StoredKeys)
        need_BKn = relative_need(index.scores(q_BNH), slots)
        slots.mark(need_BKn, sinks=self.sinks, recent=self.recent)
        return most_needed(need_BKn, self.num_chosen(slots), slots)
