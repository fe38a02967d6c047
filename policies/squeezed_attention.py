"""Squeezed Attention (Hooper et al., ACL 2025): retrieve the clusters of keys whose score exceeds a threshold.

The score of a cluster i of keys with mean C_i is S_i = exp(q C_i) / sum_j n_j exp(q C_j), about the probability of one
of its tokens (Sec. 4.2), as a mean over queries and the heads of a group. The threshold is the quantile of the tokens'
scores by the last queries of the prompt, so that the mean number of tokens above it is known. Here each KV head has a
threshold of its own, published is one for all heads and layers; and those of a row fetch the mean of their numbers.

With two levels (Sec. 4.4) the means of clusters are clustered themselves. A query is first compared with these coarse
clusters; clusters of those below a threshold of their own are not compared with it, nor counted in the sum above.

At most `max_fetch` is fetched; with `fetch` that number. Every prompt is clustered, where the paper does that once for
a fixed context; the modules of a Prompt Cache are clustered once, as there (docs/prompt_cache.md). New tokens are
clustered in blocks of `block`; every 256 of them the thresholds are made anew, for queries at later positions, and the
clusters stay. `coarse=5` adds the second level: clusters of five clusters on average. The share of tokens above the
threshold is the same on one level and on two.
"""

# Legend: B batch, N query heads, K kv heads, n slots, P clusters of several tokens, W last tokens that are alone,
# Y = P + W, Z coarse clusters, m clusters that are compared, H key dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.clustering import Clustering
from policies.clusterkv import ClusterKV
from policies.clusters import Clusters, Ranking
from policies.coarse_clusters import CoarseClusters
from policies.options import Budget, require, require_default, require_least
from policies.retriever import Choice, Group, PromptView, Slots, need_of_group, num_needed


class ThresholdClusters(Clusters):
    """Index of clusters with the score from which on they are needed.

    Attributes:
        least_BK, least_coarse_BK: thresholds of clusters and of coarse ones, float64.
        coarse: coarse clusters, if there are two levels.
    """

    how: SqueezedAttention

    def __init__(self, view: PromptView, how: SqueezedAttention, clustering: Clustering) -> None:
        super().__init__(view, how, clustering)
        self.coarse = CoarseClusters.from_clusters(self._clusters, how.coarse) if how.coarse else None
        self.renew(view)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.coarse is None else self.coarse.num_bytes)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        num_before = self._clusters.sizes_BKP.shape[2]
        super().append(k_BKCH, v_BKCV)
        if self.coarse is not None and self._clusters.sizes_BKP.shape[2] > num_before:
            new = CoarseClusters.from_clusters(self._clusters, self.how.coarse, num_before)
            self.coarse = self.coarse.joined(new)

    def renew(self, view: PromptView) -> None:
        slots = Slots(num_slots=self.num_slots, pads=view.pads, positions_BKn=None, next_B=None)
        rows = dict[int, list[int]]()
        for row, pad in enumerate(view.pads):
            rows.setdefault(min(view.q_BNwH.shape[2], self.num_slots - pad), []).append(row)  # others are padding
        self.least_BK = view.k_BKnH.new_zeros(view.k_BKnH.shape[:2], dtype=torch.float64)
        self.least_coarse_BK = torch.zeros_like(self.least_BK)
        for num_queries, same in rows.items():
            if num_queries == 0:  # a rank may have no token of a row
                continue
            q_BNwH = view.q_BNwH[:, :, -num_queries:]
            q_BNH = q_BNwH.unflatten(1, (self.num_kv_heads, -1)).flatten(1, 3)
            if self.coarse is not None:
                score_BKx = self._coarse_scores(q_BNH, self.sizes_BKY(slots))
                coarse_BKn = score_BKx.take_along_dim(self._coarse_of_slots(), dim=2)
                _set_quantile(self.least_coarse_BK, self.how.coarse_quantile, coarse_BKn, slots.pads, same)
            _set_quantile(self.least_BK, self.how.quantile, self.slot_scores(q_BNH, slots), slots.pads, same)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how = self.how
        if how.fetch is not None:
            return super().choose(q_BNH, slots)
        sizes_BKY = self.sizes_BKY(slots)
        score_BKY = self.cluster_needs(q_BNH, slots, sizes_BKY).double() - self.least_BK.unsqueeze(2)
        self.mark(score_BKY, slots)
        needed = num_needed(score_BKY, 0.0, slots, sizes_BKY)
        num_chosen = how.num_chosen(slots, min(needed, int(how.max_fetch * slots.num_slots)))
        return self.best_slots(Ranking.by(score_BKY, sizes_BKY), num_chosen, slots)

    def slot_scores(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Score (B, K, n) of each slot's cluster by these queries, see `cluster_needs`."""
        return self.cluster_needs(q_BNH, slots, self.sizes_BKY(slots)).take_along_dim(self.of_BKn, dim=2)

    def cluster_needs(self, q_BNH: Tensor, slots: Slots, sizes_BKY: Tensor) -> Tensor:
        """Score (B, K, Y) of each cluster by these queries; -1 where its coarse cluster is below its threshold.

        It is the cluster's probability among the clusters that are compared, divided by its tokens.
        """
        if self.coarse is None:
            return super().cluster_needs(q_BNH, slots, sizes_BKY)
        of_BKP = self.coarse.of_BKP
        score_BKZ = self._coarse_scores(q_BNH, sizes_BKY)[..., : self.coarse.sizes_BKZ.shape[2]]
        stays_BKP = (score_BKZ >= self.least_coarse_BK.unsqueeze(2)).take_along_dim(of_BKP, dim=2)
        # As many clusters for each head as for the head with most; the others of a head have no probability.
        index_BKm = stays_BKP.byte().argsort(dim=2, descending=True, stable=True)
        slots.await_device()
        index_BKm = index_BKm[..., : int(stays_BKP.sum(dim=2).max())]
        sizes_BKm = (sizes_BKY[..., : of_BKP.shape[2]] * stays_BKP).take_along_dim(index_BKm, dim=2)
        sizes_BKx = torch.cat([sizes_BKm, sizes_BKY[..., of_BKP.shape[2] :]], dim=2)
        means_BKmH = self._clusters.means_BKPH.take_along_dim(index_BKm.unsqueeze(3), dim=2)
        k_BKxH = torch.cat([means_BKmH, self._k_BKWH], dim=2)
        need_BKx = need_of_group(self.mean_scores(q_BNH, sizes_BKx, k_BKxH), self.how.group, sizes_BKx)
        need_BKm, need_BKW = need_BKx.masked_fill_(sizes_BKx == 0, -1).split([index_BKm.shape[2], self.num_alone], 2)
        need_BKP = torch.full_like(stays_BKP, -1, dtype=need_BKm.dtype).scatter_(2, index_BKm, need_BKm)
        return torch.cat([need_BKP, need_BKW], dim=2)

    def _coarse_scores(self, q_BNH: Tensor, sizes_BKY: Tensor) -> Tensor:
        """Score (B, K, Z + W) of each coarse cluster, and of each token that is alone."""
        assert self.coarse is not None
        alone_BKW = sizes_BKY[..., self.coarse.of_BKP.shape[2] :]
        sizes_BKx = torch.cat([self.coarse.sizes_BKZ, alone_BKW], dim=2)
        scores_BKGx = self.mean_scores(q_BNH, sizes_BKx, torch.cat([self.coarse.means_BKZH, self._k_BKWH], dim=2))
        return need_of_group(scores_BKGx, self.how.group, sizes_BKx).double()

    def _coarse_of_slots(self) -> Tensor:
        """Coarse cluster (B, K, n) of each slot; a token that is alone is one of its own."""
        assert self.coarse is not None
        of_BKP, num_coarse = self.coarse.of_BKP, self.coarse.sizes_BKZ.shape[2]
        alone_W = torch.arange(num_coarse, num_coarse + self.num_alone, device=of_BKP.device)
        of_BKY = torch.cat([of_BKP, alone_W.expand(*of_BKP.shape[:2], -1)], dim=2)
        return of_BKY.take_along_dim(self.of_BKn, dim=2)


def _set_quantile(
    least_BK: Tensor, quantile: float, score_BKn: Tensor, pads: Sequence[int], rows: Sequence[int]
) -> None:
    """Set the thresholds of some rows to a quantile of their tokens' scores."""
    for row in rows:
        score_Kn = score_BKn[row, :, pads[row] :].double()
        least_BK[row] = score_Kn.kthvalue(1 + int(quantile * score_Kn.shape[1]), dim=1).values


@dataclass(kw_only=True)
class SqueezedAttention(ClusterKV, name="squeezed_attention"):
    """Retrieve the clusters of similar keys with scores above a threshold.

    Attributes:
        quantile: share of the prompt's tokens whose scores by its last queries are below the threshold.
        coarse: mean number of clusters in a coarse cluster; 0 has no coarse ones.
        coarse_quantile: the same as `quantile` of coarse clusters, whose clusters are then not looked at.
        max_fetch: largest share of the slots that is fetched.
        observed: number of these last queries.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = ThresholdClusters
    renews_index: ClassVar[bool] = True

    fetch: Budget | None = None
    group: Group = Group.mean
    sinks: int = 4
    recent: int = 100
    cluster: int = 20
    quantile: float = 0.9
    coarse: int = 0
    coarse_quantile: float = 0.5
    max_fetch: float = 0.3
    observed: int = 100  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.quantile < 1, "quantile", self.quantile, "must be at least 0 and below 1")
        require(self.coarse >= 0, "coarse", self.coarse, "must not be negative; 0 has no coarse clusters")
        if self.coarse:
            least, most = self.coarse_quantile, self.quantile
            require(0 <= least <= most, "coarse_quantile", least, f"must be from 0 to policy.quantile={most}")
            require(self.fetch is None, "coarse", self.coarse, "has a threshold; leave policy.fetch out")
        require_default(self, "coarse_quantile", given=not self.coarse, rule="without policy.coarse; leave it out")
        require(0 < self.max_fetch <= 1, "max_fetch", self.max_fetch, "must be above 0 and at most 1")
        rule = f"with policy.fetch={self.fetch}, which is a fixed number; leave one of them out"
        require_default(self, "quantile", "max_fetch", given=self.fetch is not None, rule=rule)
        require_least(self, observed=1)
        if self.group not in (Group.mean, Group.max):
            raise ValueError(
                f"policy.group={self.group.name} has no probabilities to compare with a threshold; use mean or max"
            )
