"""Exact top-k: retrieve the tokens with the highest scores, computed from all keys.

It reads every key in every step, so it is an upper bound on the quality of retrieval, not a fast method.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, H key dim.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Budget
from policies.retriever import (
    Choice,
    Index,
    PromptView,
    Retriever,
    Slots,
    most_needed,
    need_of_group,
    without_padding,
)

PART = 1024
"""Keys that are scored at once on a CPU."""


class StoredKeys(Index):
    """Index that computes scores from the keys in the pool itself."""

    def __init__(self, stored: Callable[[], Tensor], num_slots: int, scaling: float) -> None:
        super().__init__(num_slots)
        self.stored, self._scaling = stored, scaling

    def scores(self, q_BNH: Tensor) -> Tensor:
        """Scaled scores (B, K, G, n), in at least float32."""
        k_BKnH = self.stored()
        q_BKGH = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * self._scaling
        # On a CPU the product with keys that lie beside values takes half the time in parts that fit into its cache.
        parts = k_BKnH.split(PART if k_BKnH.device.type == "cpu" else max(1, k_BKnH.shape[2]), dim=2)
        scores_BKGn = torch.cat([q_BKGH @ part.transpose(-1, -2) for part in parts], dim=3)
        return scores_BKGn.to(torch.promote_types(scores_BKGn.dtype, torch.float32))


@dataclass(kw_only=True)
class ExactTopK(Retriever, name="exact_topk"):
    """Retrieve `fetch` slots for every KV head, by the layer's own query."""

    fetch: Budget | None = 0.1

    def index(self, view: PromptView) -> StoredKeys:
        return StoredKeys(view.stored, view.k_BKnH.shape[2], view.scaling)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, StoredKeys)
        need_BKn = need_of_group(without_padding(index.scores(q_BNH), slots), self.group)
        slots.mark(need_BKn, sinks=self.sinks, recent=self.recent)
        return most_needed(need_BKn, self.num_chosen(slots), slots)
