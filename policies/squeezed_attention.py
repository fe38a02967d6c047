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

# Legend: B batch, N query heads, K kv heads, n slots, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.base import Budget, require, require_default, require_least
from policies.clusterkv import ClusterKV
from policies.clusters import Ranking
from policies.retriever import Choice, Group, Index, PromptView, Slots, num_needed
from policies.threshold_clusters import ThresholdClusters, Thresholds


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

    def index(self, view: PromptView) -> ThresholdClusters:
        thresholds = Thresholds(
            group=self.group, quantile=self.quantile, coarse_quantile=self.coarse_quantile, coarse=self.coarse
        )
        return ThresholdClusters(view, self.clustering, thresholds)

    def renewed(self, index: Index, view: PromptView) -> ThresholdClusters:
        assert isinstance(index, ThresholdClusters)
        index.set_least(view)
        return index

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, ThresholdClusters)
        if self.fetch is not None:
            return super().choose(index, q_BNH, slots)
        sizes_BKY = index.sizes_BKY(slots)
        score_BKY = index.needs(q_BNH, slots).double() - index.least_BK.unsqueeze(2)
        index.mark(score_BKY, slots, sinks=self.sinks, recent=self.recent)
        needed = num_needed(score_BKY, 0.0, slots, sizes_BKY)
        num_chosen = self.num_chosen(slots, min(needed, int(self.max_fetch * slots.num_slots)))
        return index.best_slots(Ranking.by(score_BKY, sizes_BKY), num_chosen, slots)
