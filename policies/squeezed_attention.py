"""Squeezed Attention (Hooper et al., ACL 2025): retrieve the clusters of keys whose score exceeds a threshold.

The score of a cluster i of keys with mean C_i is S_i = exp(q C_i) / sum_j n_j exp(q C_j), about the probability of one
of its tokens (Sec. 4.2), as a mean over queries and the heads of a group. The threshold is the quantile of the tokens'
scores by the last queries of the prompt, so that the mean number of tokens above it is known. Here each KV head has a
threshold of its own, published is one for all heads and layers; and those of a row fetch the mean of their numbers.
"""

# Legend: B batch, N query heads, K kv heads, n slots, w observed tokens, Y clusters, H key dim.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Budget, require, require_least
from policies.clusterkv import ClusterKV
from policies.clusters import Clusters
from policies.retriever import Choice, Group, Index, PromptView, Slots, most_needed, need_of_group, num_needed


class ThresholdClusters(Clusters):
    """Index of clusters with the score from which on they are needed.

    Args:
        view: the layer after the prompt.
        policy: says how keys are clustered, and the quantile.
    """

    def __init__(self, view: PromptView, policy: SqueezedAttention) -> None:
        super().__init__(view, policy.clustering)
        slots = Slots(num_slots=self.num_slots, pads=view.pads, positions_BKn=None, next_B=None)
        num_kv_heads, scores = view.k_BKnH.shape[1], dict[int, Tensor]()
        least = list[Tensor]()
        for row, pad in enumerate(view.pads):
            num_queries = min(view.q_BNwH.shape[2], self.num_slots - pad)  # those before are padding
            if num_queries == 0:  # a rank may have no token of a row
                least.append(view.k_BKnH.new_zeros(num_kv_heads, dtype=torch.float64))
                continue
            if num_queries not in scores:
                q_BNwH = view.q_BNwH[:, :, -num_queries:]
                q_BNH = q_BNwH.unflatten(1, (num_kv_heads, -1)).flatten(1, 3)
                scores[num_queries] = self.slot_scores(q_BNH, policy.group, slots).double()
            score_Kn = scores[num_queries][row, :, pad:]
            least.append(score_Kn.kthvalue(1 + int(policy.quantile * score_Kn.shape[1]), dim=1).values)
        self.least_BK = torch.stack(least)

    def slot_scores(self, q_BNH: Tensor, group: Group, slots: Slots) -> Tensor:
        """Score (B, K, n) of each slot's cluster by these queries."""
        sizes_BKY = self.sizes_BKY(slots)
        need_BKY = need_of_group(self.scores(q_BNH, sizes_BKY), group, sizes_BKY)
        return need_BKY.take_along_dim(self.of_BKn, dim=2)


@dataclass(kw_only=True)
class SqueezedAttention(ClusterKV):
    """Retrieve the clusters of similar keys with scores above a threshold.

    Attributes:
        quantile: share of the prompt's tokens whose scores by its last queries are below the threshold.
        max_fetch: largest share of the slots that is fetched.
        observed: number of these last queries.

    Raises:
        ValueError: an option is out of range.
    """

    fetch: Budget | None = None
    group: Group = Group.mean
    sinks: int = 4
    recent: int = 100
    cluster: int = 20
    quantile: float = 0.9
    max_fetch: float = 0.3
    observed: int = 100  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.quantile < 1, "quantile", self.quantile, "must be at least 0 and below 1")
        require(0 < self.max_fetch <= 1, "max_fetch", self.max_fetch, "must be above 0 and at most 1")
        require_least(self, observed=1)
        if self.group not in (Group.mean, Group.max):
            raise ValueError(
                f"policy.group={self.group.name} has no probabilities to compare with a threshold; use mean or max"
            )

    def index(self, view: PromptView) -> ThresholdClusters:
        return ThresholdClusters(view, self)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, ThresholdClusters)
        if self.fetch is not None:
            return super().choose(index, q_BNH, slots)
        score_BKn = index.slot_scores(q_BNH, self.group, slots).double() - index.least_BK.unsqueeze(2)
        slots.mark(score_BKn, sinks=self.sinks, recent=self.recent)
        wanted = min(num_needed(score_BKn, 0.0, slots), int(self.max_fetch * slots.num_slots))
        return most_needed(score_BKn, self.num_chosen(slots, wanted), slots)
