"""Clusters of similar keys as an index: what a query scores are their means, and new tokens until they are clustered.

Keys are clustered (`policies.clustering`) after the prompt, and later whenever a block of new tokens has come. Until
then a token is a cluster of its own, as the first and last tokens of a prompt.
"""

# Legend: B batch, K kv heads, G query heads of one KV head, n slots, C new tokens, H key dim, V value dim,
# P clusters of several tokens, W last tokens that are alone, Y = P + W, T room for those, m chosen slots, X heads, or
# clusters or slots with room.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.clustering import Clustering, TokenClusters, alone
from policies.precision import widened
from policies.retriever import Choice, Index, PromptView, Retriever, Slots, need_of_group
from policies.row_values import row_values

NEW_ROOM = 64
"""New tokens for which memory is allocated at once."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Clusters from the one that is needed most to the last one.

    Attributes:
        order_BKY: cluster at each place.
        sizes_BKY: number of tokens of the cluster at each place.
        ends_BKY: number of tokens of all clusters up to each place.
    """

    order_BKY: Tensor
    sizes_BKY: Tensor
    ends_BKY: Tensor

    @classmethod
    def by(cls, need_BKY: Tensor, sizes_BKY: Tensor) -> Ranking:
        """Clusters of these sizes by their need."""
        order_BKY = need_BKY.argsort(dim=-1, stable=True).flip(-1)  # of equal ones the later first
        sizes_BKY = sizes_BKY.gather(2, order_BKY)
        return cls(order_BKY=order_BKY, sizes_BKY=sizes_BKY, ends_BKY=sizes_BKY.cumsum(dim=-1))

    def is_left(self, num_chosen: int) -> Tensor:
        """Mask of clusters (B, K, Y) that have no token among the best `num_chosen` ones."""
        is_left_BKY = self.ends_BKY - self.sizes_BKY >= num_chosen
        return torch.empty_like(is_left_BKY).scatter_(2, self.order_BKY, is_left_BKY)


class Clusters(Index):
    """Index of clusters of keys.

    Args:
        clustering: how keys are clustered.
    """

    def __init__(self, view: PromptView, how: Retriever, clustering: Clustering) -> None:
        super().__init__(view, how)
        self._clustering = clustering
        k_BKnH, v_BKnV = view.k_BKnH, view.v_BKnV if clustering.has_values else view.v_BKnV[..., :0]
        clustered = max(0, self.num_slots - clustering.alone_last)
        clusters = clustering.of_rows(
            k_BKnH[:, :, :clustered], v_BKnV[:, :, :clustered], view.pads, view.stored_parts_B
        )
        self._arrange(clusters, k_BKnH[:, :, clustered:], v_BKnV[:, :, clustered:])

    def _arrange(self, clusters: TokenClusters, k_BKWH: Tensor, v_BKWV: Tensor) -> None:
        """Take over new clusters and the tokens after them, which are alone."""
        self._of_BKn, self._num_clusters = clusters.of_BKn, clusters.sizes_BKP.shape[2]
        self._num_alone = k_BKWH.shape[2]
        batch, heads, num_clustered = clusters.of_BKn.shape
        most = self._clustering.alone_last + self._clustering.block
        # Means of clusters, then the tokens after them, with room for more: compared with a query in one product.
        self._k_BKTH = torch.cat([clusters.means_BKPH, k_BKWH], dim=2)
        self._v_BKTV = torch.cat([clusters.values_BKPV, v_BKWV], dim=2)
        of_BKn = clusters.of_BKn.clone()
        for row, num_pads in enumerate(self.pads):  # padding comes after all clusters
            of_BKn[row, :, :num_pads] = self._num_clusters
        alone_T = torch.arange(num_clustered, num_clustered + most, device=of_BKn.device).expand(batch, heads, -1)
        # Slots by cluster, the latest of each first, and where each cluster begins among them.
        sorted_BKn = num_clustered - 1 - of_BKn.flip(2).argsort(dim=2, stable=True)
        self._members_BKX = torch.cat([sorted_BKn, alone_T], dim=2).int()
        begins_BKP = (clusters.sizes_BKP.cumsum(dim=2) - clusters.sizes_BKP).long()
        self._begins_BKX = torch.cat([begins_BKP, alone_T], dim=2)
        ones_BKT = torch.ones_like(alone_T, dtype=clusters.sizes_BKP.dtype)
        self._sizes_BKX = torch.cat([clusters.sizes_BKP, ones_BKT], dim=2)

    @property
    def _clusters(self) -> TokenClusters:
        """The clusters of several tokens, as views."""
        every = slice(self._num_clusters)
        return TokenClusters(
            means_BKPH=self._k_BKTH[:, :, every],
            values_BKPV=self._v_BKTV[:, :, every],
            sizes_BKP=self._sizes_BKX[:, :, every],
            of_BKn=self._of_BKn,
        )

    @property
    def num_bytes(self) -> int:
        held = self._k_BKTH, self._v_BKTV, self._of_BKn, self._members_BKX, self._begins_BKX, self._sizes_BKX
        return sum(each.nbytes for each in held)

    @property
    def scored_bytes(self) -> int:
        """Bytes of the keys that a query is compared with, and of their values if these are estimated."""
        end = self._num_clusters + self._num_alone
        return self._k_BKTH[:, :, :end].nbytes + self._v_BKTV[:, :, :end].nbytes

    @property
    def _k_BKWH(self) -> Tensor:  # noqa: N802
        """Keys of the tokens after all clusters."""
        return self._k_BKTH[:, :, self._num_clusters : self._num_clusters + self._num_alone]

    @property
    def _v_BKWV(self) -> Tensor:  # noqa: N802
        """Their values, of dim 0 if values are not kept."""
        return self._v_BKTV[:, :, self._num_clusters : self._num_clusters + self._num_alone]

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        how, begin, end = self._clustering, self._num_alone, self._num_alone + k_BKCH.shape[2]
        v_BKCV = v_BKCV if how.has_values else v_BKCV[..., :0]
        self.num_slots += k_BKCH.shape[2]
        if end < how.alone_last + how.block:
            new = slice(self._num_clusters + begin, self._num_clusters + end)
            if new.stop > self._k_BKTH.shape[2]:
                more = 0, 0, 0, new.stop + NEW_ROOM - self._k_BKTH.shape[2]
                self._k_BKTH, self._v_BKTV = pad(self._k_BKTH, more), pad(self._v_BKTV, more)
            self._k_BKTH[:, :, new], self._v_BKTV[:, :, new], self._num_alone = k_BKCH, v_BKCV, end
            return
        k_BKWH, v_BKWV = torch.cat([self._k_BKWH, k_BKCH], dim=2), torch.cat([self._v_BKWV, v_BKCV], dim=2)
        num_clustered = self._of_BKn.shape[2]
        first = min(end - how.alone_last, max(0, max(self.pads) + how.alone_first - num_clustered))
        parts = [self._clusters, alone(k_BKWH[:, :, :first], v_BKWV[:, :, :first])]
        for row, num_pads in enumerate(self.pads):
            parts[1].sizes_BKP[row, :, : max(0, num_pads - num_clustered)] = 0
        last = first + max(0, end - how.alone_last - first) // how.block * how.block
        for start in range(first, last, how.block):
            block = slice(start, start + how.block)
            parts.append(how.clustered(k_BKWH[:, :, block], v_BKWV[:, :, block]))
        self._arrange(TokenClusters.joined(parts), k_BKWH[:, :, last:], v_BKWV[:, :, last:])

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        other = super().fork(stored)
        other._k_BKTH, other._v_BKTV = self._k_BKTH.clone(), self._v_BKTV.clone()
        return other

    @property
    def num_alone(self) -> int:
        """Number of last tokens that are alone."""
        return self._num_alone

    @property
    def of_BKn(self) -> Tensor:  # noqa: N802
        """Cluster (B, K, n) of each slot; any one for padding."""
        batch, heads, num_clustered = self._of_BKn.shape
        end = self._num_clusters + self.num_slots - num_clustered
        alone_W = torch.arange(self._num_clusters, end, device=self._k_BKTH.device)
        return torch.cat([self._of_BKn.long(), alone_W.expand(batch, heads, -1)], dim=2)

    def sizes_BKY(self, slots: Slots) -> Tensor:  # noqa: N802
        """Number of tokens (B, K, Y) of each cluster, 0 where there is none."""
        num_clusters, num_clustered = self._num_clusters, self._of_BKn.shape[2]
        sizes_BKY = self._sizes_BKX[:, :, : num_clusters + self._num_alone]
        if max(slots.pads) > num_clustered:
            sizes_BKY = sizes_BKY.clone()
            for row, num_pads in enumerate(slots.pads):
                sizes_BKY[row, :, num_clusters : num_clusters + max(0, num_pads - num_clustered)] = 0
        return sizes_BKY

    def mean_scores(self, q_BNH: Tensor, sizes_BKY: Tensor, k_BKYH: Tensor | None = None) -> Tensor:
        """Scores (B, K, G, Y) of the mean keys, scaled, in at least float32; minus infinity where there is no token.

        Args:
            k_BKYH: the mean keys; None is those of all clusters.
        """
        k_BKYH = self._k_BKTH[:, :, : sizes_BKY.shape[2]] if k_BKYH is None else k_BKYH
        batch, heads, _ = sizes_BKY.shape
        q_XGH = q_BNH.reshape(batch * heads, -1, q_BNH.shape[2]) * self.scaling
        scores_BKGY = widened(q_XGH.bmm(k_BKYH.flatten(0, 1).mT)).unflatten(0, (batch, heads))
        return scores_BKGY.masked_fill_((sizes_BKY == 0).unsqueeze(2), -torch.inf)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        sizes_BKY = self.sizes_BKY(slots)
        need_BKY = self.cluster_needs(q_BNH, slots, sizes_BKY)
        self.mark(need_BKY, slots)
        return self.best_slots(Ranking.by(need_BKY, sizes_BKY), self.how.num_chosen(slots), slots)

    def cluster_needs(self, q_BNH: Tensor, slots: Slots, sizes_BKY: Tensor) -> Tensor:
        """Need (B, K, Y) of each cluster by these queries."""
        return need_of_group(self.mean_scores(q_BNH, sizes_BKY), self.how.group, sizes_BKY)

    def mark(self, need_BKY: Tensor, slots: Slots) -> None:
        """Set the need of the clusters of the first and last tokens, which are alone in them, to infinity."""
        if slots.positions_BKn is None and not any(slots.pads):
            need_BKY[..., : self.how.sinks] = torch.inf
            need_BKY[..., max(0, need_BKY.shape[2] - self.how.recent) :] = torch.inf
            return
        need_BKn = need_BKY.new_full((*need_BKY.shape[:2], self.num_slots), -torch.inf)
        slots.mark(need_BKn, self.how)
        need_BKY.scatter_reduce_(2, self.of_BKn, need_BKn, "amax")

    def best_slots(self, ranking: Ranking, num_chosen: int, slots: Slots) -> Choice | None:
        """The slots of the best clusters, of the last one the latest, then the padding closest to the tokens.

        None: all slots.
        """
        if num_chosen == slots.num_slots:
            return None
        ends_BKY = ranking.ends_BKY
        number_m = torch.arange(num_chosen, device=ends_BKY.device, dtype=ends_BKY.dtype)
        number_BKm = number_m.expand(*ends_BKY.shape[:2], -1)
        place_BKm = torch.searchsorted(ends_BKY, number_BKm.contiguous(), right=True)
        is_padded = any(slots.num_slots - pad < num_chosen for pad in slots.pads)
        if is_padded:
            place_BKm = place_BKm.clamp_(max=ends_BKY.shape[2] - 1)
        # Of the cluster at place y tokens come from where it begins on; they are chosen from `ends - sizes` on.
        ahead_BKY = self._begins_BKX.gather(2, ranking.order_BKY) - (ends_BKY - ranking.sizes_BKY).long()
        at_BKm = ahead_BKY.gather(2, place_BKm) + number_m.long()
        if not is_padded:
            return Choice(slots_BKm=self._members_BKX.gather(2, at_BKm).long())
        lacking_BKm = number_BKm - ends_BKY[..., -1:]  # from 0 on where there is no further token
        pads_B11 = row_values(slots.pads, ends_BKY.device)[:, None, None]
        slots_BKm = self._members_BKX.gather(2, at_BKm.clamp_(max=self._members_BKX.shape[2] - 1))
        return Choice(slots_BKm=torch.where(lacking_BKm < 0, slots_BKm, pads_B11 - 1 - lacking_BKm.long()))
