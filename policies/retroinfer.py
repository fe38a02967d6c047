"""RetroInfer (Chen et al., VLDB 2026): retrieve the best clusters of keys, and estimate the attention to the others.

Clusters are those of `policies.clusters`, of keys centred by their mean. What is not fetched has the weight
n exp(q C) of a cluster's n tokens with mean key C and mean value (Sec. 4.2), a lower bound of what its tokens have. Of
a cluster that is fetched in part, the rest is left out. Here all other clusters are estimated by default, published are
those that hold 23% of the tokens; and the group's heads choose by their mean probability.

`estimate=0.23` is the published share. `fetch` is 10% here and 1.8% there, at 120,000 tokens.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, Y clusters, p the best ones, H key dim, V value dim.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.clustering import Clustering
from policies.clusterkv import ClusterKV
from policies.clusters import Clusters, Ranking
from policies.options import require
from policies.retriever import Choice, Group, Rest, Slots, need_of_group


class EstimatingClusters(Clusters):
    """Index of clusters, by which the attention to those that are not fetched is estimated."""

    how: RetroInfer

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how, sizes_BKY = self.how, self.sizes_BKY(slots)
        scores_BKGY = self.mean_scores(q_BNH, sizes_BKY)
        need_BKY = need_of_group(scores_BKGY.clone(), how.group, sizes_BKY)
        self.mark(need_BKY, slots)
        ranking, num_chosen = Ranking.by(need_BKY, sizes_BKY), how.num_chosen(slots)
        choice = self.best_slots(ranking, num_chosen, slots)
        if choice is None or not how.estimates_rest:
            return choice
        is_left_BKY = ranking.is_left(num_chosen)
        if how.estimate < 1:
            number = round(how.estimate * sizes_BKY.shape[2])
            best_BKp = need_BKY.masked_fill(~is_left_BKY, -torch.inf).topk(number, dim=-1).indices
            is_left_BKY &= torch.zeros_like(is_left_BKY).scatter_(2, best_BKp, True)
        return replace(choice, rest=self._estimate(scores_BKGY, sizes_BKY, is_left_BKY))

    def _estimate(self, scores_BKGY: Tensor, sizes_BKY: Tensor, is_estimated_BKY: Tensor) -> Rest:
        """Attention to some clusters, as if all of a cluster's tokens had its mean key and value.

        The log-sum-exp is never above that of their tokens' scores, since the exponential function is convex.
        """
        if self.softcap is not None:
            scores_BKGY = self.softcap * torch.tanh(scores_BKGY / self.softcap)
        # In float32 another processor's logarithm has another last bit.
        logits_BKGY = (scores_BKGY + sizes_BKY.to(scores_BKGY.dtype).log().unsqueeze(2)).masked_fill_(
            ~is_estimated_BKY.unsqueeze(2), -torch.inf
        )
        lse_BKG = logits_BKGY.logsumexp(dim=-1)
        weights_BKGY = logits_BKGY.sub_(lse_BKG.unsqueeze(-1)).exp_().nan_to_num_(0.0)
        out_BKGV = weights_BKGY @ self._v_BKTV[:, :, : sizes_BKY.shape[2]].to(weights_BKGY.dtype)
        return Rest(out_BNV=out_BKGV.flatten(1, 2), lse_BN=lse_BKG.flatten(1, 2))


@dataclass(kw_only=True)
class RetroInfer(ClusterKV, name="retroinfer"):
    """Retrieve clusters of similar keys, `fetch` slots in total, and estimate the attention to others.

    Attributes:
        estimate: share of the clusters whose attention is estimated, the best of those that are not fetched; 0
            estimates none.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = EstimatingClusters

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
