"""Clusters of keys with the score from which on they are needed, on one level or two (Squeezed Attention)."""

# Legend: B batch, N query heads, K kv heads, n slots, P clusters of several tokens, W last tokens that are alone,
# Y = P + W, Z coarse clusters, m clusters that are compared, H key dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.clustering import Clustering
from policies.clusters import Clusters
from policies.coarse_clusters import CoarseClusters
from policies.retriever import Group, PromptView, Slots, need_of_group


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """How scores and their thresholds are made.

    Attributes:
        group: how the query heads of a KV head score together.
        quantile, coarse_quantile: share of the tokens whose clusters, and coarse ones, score below the threshold.
        coarse: mean number of clusters in a coarse one; 0 has one level.
    """

    group: Group
    quantile: float
    coarse_quantile: float
    coarse: int


class ThresholdClusters(Clusters):
    """Index of clusters with the score from which on they are needed.

    Args:
        view: the layer after the prompt.
        how: how keys are clustered.
        thresholds: how scores are made, and the quantiles.

    Attributes:
        least_BK, least_coarse_BK: thresholds of clusters and of coarse ones, float64.
        coarse: coarse clusters, if there are two levels.
    """

    def __init__(self, view: PromptView, how: Clustering, thresholds: Thresholds) -> None:
        super().__init__(view, how)
        self.thresholds, size = thresholds, thresholds.coarse
        self.coarse = CoarseClusters.from_clusters(self._clusters, size) if size else None
        self.set_least(view)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.coarse is None else self.coarse.num_bytes)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        num_before = self._clusters.sizes_BKP.shape[2]
        super().append(k_BKCH, v_BKCV)
        if self.coarse is not None and self._clusters.sizes_BKP.shape[2] > num_before:
            self.coarse = self.coarse.joined(
                CoarseClusters.from_clusters(self._clusters, self.thresholds.coarse, num_before)
            )

    def set_least(self, view: PromptView) -> None:
        """Set the thresholds by the queries of `view`, whose slots are those of this index."""
        slots = Slots(num_slots=self.num_slots, pads=view.pads, positions_BKn=None, next_B=None)
        batch, num_kv_heads, rows = len(view.pads), view.k_BKnH.shape[1], dict[int, list[int]]()
        for row, pad in enumerate(view.pads):
            rows.setdefault(min(view.q_BNwH.shape[2], self.num_slots - pad), []).append(row)  # others are padding
        self.least_BK = view.k_BKnH.new_zeros(batch, num_kv_heads, dtype=torch.float64)
        self.least_coarse_BK = torch.zeros_like(self.least_BK)
        for num_queries, same in rows.items():
            if num_queries == 0:  # a rank may have no token of a row
                continue
            q_BNwH = view.q_BNwH[:, :, -num_queries:]
            q_BNH = q_BNwH.unflatten(1, (num_kv_heads, -1)).flatten(1, 3)
            if self.coarse is not None:
                coarse_BKn = self._coarse_scores(q_BNH, slots).take_along_dim(self._coarse_of_slots(), dim=2)
                _set_quantile(self.least_coarse_BK, self.thresholds.coarse_quantile, coarse_BKn, slots.pads, same)
            _set_quantile(self.least_BK, self.thresholds.quantile, self.slot_scores(q_BNH, slots), slots.pads, same)

    def slot_scores(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Score (B, K, n) of each slot's cluster by these queries, see `needs`."""
        return self.needs(q_BNH, slots).take_along_dim(self.of_BKn, dim=2)

    def needs(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Score (B, K, Y) of each cluster by these queries; -1 where its coarse cluster is below its threshold.

        It is the cluster's probability among the clusters that are compared, divided by its tokens.
        """
        sizes_BKY, group = self.sizes_BKY(slots), self.thresholds.group
        if self.coarse is None:
            return need_of_group(self.scores(q_BNH, sizes_BKY), group, sizes_BKY)
        num_clusters, stays_BKP = self.coarse.of_BKP.shape[2], self._stays(self.coarse, q_BNH, slots)
        # As many clusters for each head as for the head with most; the others of a head have no probability.
        index_BKm = stays_BKP.byte().argsort(dim=2, descending=True, stable=True)
        slots.await_device()
        index_BKm = index_BKm[..., : int(stays_BKP.sum(dim=2).max())]
        sizes_BKm = (sizes_BKY[..., :num_clusters] * stays_BKP).take_along_dim(index_BKm, dim=2)
        sizes_BKx = torch.cat([sizes_BKm, sizes_BKY[..., num_clusters:]], dim=2)
        means_BKmH = self._clusters.means_BKPH.take_along_dim(index_BKm.unsqueeze(3), dim=2)
        k_BKxH = torch.cat([means_BKmH, self._k_BKWH], dim=2)
        need_BKx = need_of_group(self.scores_of(q_BNH, k_BKxH, sizes_BKx), group, sizes_BKx)
        need_BKm, need_BKW = need_BKx.masked_fill_(sizes_BKx == 0, -1).split([index_BKm.shape[2], self.num_alone], 2)
        need_BKP = torch.full_like(stays_BKP, -1, dtype=need_BKm.dtype).scatter_(2, index_BKm, need_BKm)
        return torch.cat([need_BKP, need_BKW], dim=2)

    def compared_share(self, q_BNH: Tensor, slots: Slots) -> float:
        """Share of the clusters' means that are read for a query, coarse ones counted as well."""
        if self.coarse is None:
            return 1.0
        stays_BKP = self._stays(self.coarse, q_BNH, slots)
        return (stays_BKP.sum() + self.coarse.sizes_BKZ.numel()).item() / stays_BKP.numel()

    def _stays(self, coarse: CoarseClusters, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Whether clusters (B, K, P) are in a coarse cluster above its threshold."""
        score_BKZ = self._coarse_scores(q_BNH, slots)[..., : coarse.sizes_BKZ.shape[2]]
        return (score_BKZ >= self.least_coarse_BK.unsqueeze(2)).take_along_dim(coarse.of_BKP, dim=2)

    def _coarse_scores(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Score (B, K, Z + W) of each coarse cluster, and of each token that is alone."""
        assert self.coarse is not None
        alone_BKW = self.sizes_BKY(slots)[..., self.coarse.of_BKP.shape[2] :]
        sizes_BKx = torch.cat([self.coarse.sizes_BKZ, alone_BKW], dim=2)
        scores_BKGx = self.scores_of(q_BNH, torch.cat([self.coarse.means_BKZH, self._k_BKWH], dim=2), sizes_BKx)
        return need_of_group(scores_BKGx, self.thresholds.group, sizes_BKx).double()

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
