"""H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048): keep the tokens that received most attention.

Half of the budget is the recent window, as in the paper. On several ranks the only queries that count are those of the
rank that cuts its tokens back: the last rank, or with decode=sharded each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.layer_view import LayerView
from policies.scorer import RecentShare


@dataclass(kw_only=True)
class H2O(RecentShare, name="h2o"):
    """Score: attention probabilities summed over all queries since the token was stored, by KV head."""

    compares_by_kv_head: ClassVar[bool] = True
    scores_attention: ClassVar[bool] = True

    def carry(self, view: LayerView) -> Tensor:
        received_BKn = view.by_kv_head(self.received(view))
        return received_BKn if view.carried_BKn is None else view.carried_BKn + received_BKn

    def received(self, view: LayerView) -> Tensor:
        """Attention (B, N, n) that the new tokens' queries add to the score of each slot."""
        return view.signals.received()

    def score(self, view: LayerView) -> Tensor:
        assert view.carried_BKn is not None
        return view.carried_BKn
