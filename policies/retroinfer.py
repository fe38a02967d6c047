"""RetroInfer (Chen et al., VLDB 2026): retrieve the best clusters of keys, and estimate the attention to the others.

Clusters are those of `policies.clusters`, of keys centred by their mean. What is not fetched has the weight
n exp(q C) of a cluster's n tokens with mean key C and mean value (Sec. 4.2), a lower bound of what its tokens have. Of
a cluster that is fetched in part, the rest is left out. Here all other clusters are estimated by default, published are
those that hold 23% of the tokens; and the group's heads choose by their mean probability.

`estimate=0.23` is the published share. `fetch` is 10% here and 1.8% there, at 120,000 tokens.
"""

# Legend: B batch, N query heads, K kv heads, n slots, Y clusters, H key dim.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.base import require
from policies.clustering import Clustering
from policies.clusterkv import ClusterKV
from policies.clusters import Clusters, Ranking
from policies.retriever import Choice, Group, Index, Rest, Slots, need_of_group


@dataclass(kw_only=True)
class RetroInfer(ClusterKV, name="retroinfer"):
    """Retrieve clusters of similar keys, `fetch` slots in total, and estimate the attention to others.

    Attributes:
        estimate: share of the clusters whose attention is estimated, the best of those that are not fetched; 0
            estimates none.

    Raises:
        ValueError: an option is out of range.
    """

    group: Group = Group.mean
    sinks: int = 4
    recent: int = 64
    cluster: int = 16
    iterations: int = 10
    block: int = 1024
    estimate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.estimate <= 1, "estimate", self.estimate, "must be from 0 to 1")

    @property
    def estimates_rest(self) -> bool:
        return self.estimate > 0

    @property
    def clustering(self) -> Clustering:
        return replace(super().clustering, centred=True, has_values=self.estimates_rest)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, Clusters)
        sizes_BKY = index.sizes_BKY(slots)
        scores_BKGY = index.scores(q_BNH, sizes_BKY)
        need_BKY = need_of_group(scores_BKGY.clone(), self.group, sizes_BKY)
        index.mark(need_BKY, slots, sinks=self.sinks, recent=self.recent)
        ranking, num_chosen = Ranking.by(need_BKY, sizes_BKY), self.num_chosen(slots)
        choice = index.best_slots(ranking, num_chosen, slots)
        if choice is None or not self.estimates_rest:
            return choice
        is_left_BKY = ranking.is_left(num_chosen)
        if self.estimate < 1:
            number = round(self.estimate * sizes_BKY.shape[2])
            best_BKp = need_BKY.masked_fill(~is_left_BKY, -torch.inf).topk(number, dim=-1).indices
            is_left_BKY &= torch.zeros_like(is_left_BKY).scatter_(2, best_BKp, True)
        out_BNV, lse_BN = index.estimate(scores_BKGY, sizes_BKY, is_left_BKY)
        return Choice(slots_BKm=choice.slots_BKm, rest=Rest(out_BNV=out_BNV, lse_BN=lse_BN))
