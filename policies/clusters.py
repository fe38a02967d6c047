"""Clusters of similar keys as an index: what a query scores are their means, and new tokens until they are clustered.

Keys are clustered by direction (spherical k-means) after the prompt, in runs of consecutive tokens, and later whenever
a block of new tokens has come. Until then a token is a cluster of its own, as the first and last tokens of a prompt.
"""

# Legend: B batch, K kv heads, G query heads of one KV head, n slots, C new tokens, H key dim, V value dim,
# P clusters of several tokens, W last tokens that are alone, Y = P + W, X heads of all rows, p clusters of a run.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from policies.retriever import Index, PromptView, Slots

RUN = 8192
"""Most tokens that are clustered together, so that the cost is in proportion to the length of the prompt."""


def spherical_k_means(k_XnH: Tensor, num_clusters: int, iterations: int) -> Tensor:
    """Cluster (X, n) of each key by direction, of `num_clusters` with evenly spaced starts. Some may be empty."""
    k_XnH = normalize(k_XnH.to(torch.promote_types(k_XnH.dtype, torch.float32)), dim=-1)
    starts = torch.arange(num_clusters, device=k_XnH.device) * k_XnH.shape[1] // num_clusters
    centers_XpH = k_XnH[:, starts]
    for _ in range(iterations):
        of_Xn = (k_XnH @ centers_XpH.mT).argmax(dim=-1)
        sums_XpH = _sums(k_XnH, of_Xn, num_clusters)
        is_empty = sums_XpH.norm(dim=-1, keepdim=True) == 0
        centers_XpH = torch.where(is_empty, centers_XpH, normalize(sums_XpH, dim=-1))
    return (k_XnH @ centers_XpH.mT).argmax(dim=-1)


def _sums(x_XnH: Tensor, of_Xn: Tensor, num_clusters: int) -> Tensor:
    """Sum (X, p, H) of each cluster's rows."""
    sums_XpH = x_XnH.new_zeros(len(x_XnH), num_clusters, x_XnH.shape[2])
    return sums_XpH.scatter_add_(1, of_Xn[..., None].expand_as(x_XnH), x_XnH)


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """How keys are clustered.

    Attributes:
        size: mean number of tokens per cluster.
        iterations: of k-means.
        block: number of new tokens that are clustered together.
        alone_first, alone_last: first tokens of a text, and last ones at any time, that are alone.
        centred: subtract the mean of the keys before directions are compared.
        has_values: keep the mean value of each cluster.
    """

    size: int
    iterations: int
    block: int
    alone_first: int
    alone_last: int
    centred: bool = False
    has_values: bool = False


@dataclass(kw_only=True)
class Made:
    """Clusters of some tokens.

    Attributes:
        means_BKPH: mean keys; 0 in empty clusters.
        values_BKPV: mean values, of dim 0 if they are not kept.
        sizes_BKP: number of tokens.
        of_BKn: cluster of each token.
    """

    means_BKPH: Tensor
    values_BKPV: Tensor
    sizes_BKP: Tensor
    of_BKn: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Made]) -> Made:
        """Clusters of tokens one after another."""
        before, of = 0, list[Tensor]()
        for part in parts:
            of.append(part.of_BKn + before)
            before += part.sizes_BKP.shape[2]
        return cls(
            means_BKPH=torch.cat([part.means_BKPH for part in parts], dim=2),
            values_BKPV=torch.cat([part.values_BKPV for part in parts], dim=2),
            sizes_BKP=torch.cat([part.sizes_BKP for part in parts], dim=2),
            of_BKn=torch.cat(of, dim=2),
        )

    @classmethod
    def rows(cls, parts: Sequence[Made]) -> Made:
        """Clusters of several rows with equally many slots. A row with fewer clusters gets empty ones."""
        most = max(part.sizes_BKP.shape[2] for part in parts)
        lacking = [most - part.sizes_BKP.shape[2] for part in parts]
        pairs = list(zip(parts, lacking, strict=True))
        return cls(
            means_BKPH=torch.cat([pad(part.means_BKPH, (0, 0, 0, more)) for part, more in pairs]),
            values_BKPV=torch.cat([pad(part.values_BKPV, (0, 0, 0, more)) for part, more in pairs]),
            sizes_BKP=torch.cat([pad(part.sizes_BKP, (0, more)) for part, more in pairs]),
            of_BKn=torch.cat([part.of_BKn for part in parts]),
        )


class Clusters(Index):
    """Index of clusters of keys.

    Args:
        view: the layer after the prompt.
        how: how keys are clustered.
    """

    def __init__(self, view: PromptView, how: Clustering) -> None:
        super().__init__(view.k_BKnH.shape[2])
        self._how, self._scaling, self._softcap = how, view.scaling, view.softcap
        k_BKnH, v_BKnV = view.k_BKnH, view.v_BKnV if how.has_values else view.v_BKnV[..., :0]
        clustered = max(0, self.num_slots - how.alone_last)
        self._made = Made.rows(
            [
                self._of_row(k_BKnH[rows, :, :clustered], v_BKnV[rows, :, :clustered], pad=min(pad, clustered))
                for rows, pad in rows_by_pad(view.pads)
            ]
        )
        self._k_BKWH, self._v_BKWV = (x[:, :, clustered:].clone() for x in (k_BKnH, v_BKnV))

    @property
    def num_bytes(self) -> int:
        made = self._made
        held = made.means_BKPH, made.values_BKPV, made.sizes_BKP, made.of_BKn, self._k_BKWH, self._v_BKWV
        return sum(each.nbytes for each in held)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        how = self._how
        self.num_slots += k_BKCH.shape[2]
        k_BKWH = torch.cat([self._k_BKWH, k_BKCH], dim=2)
        v_BKWV = torch.cat([self._v_BKWV, v_BKCV if how.has_values else v_BKCV[..., :0]], dim=2)
        taken = max(0, (k_BKWH.shape[2] - how.alone_last) // how.block * how.block)
        if taken:
            blocks = zip(
                k_BKWH[:, :, :taken].split(how.block, 2), v_BKWV[:, :, :taken].split(how.block, 2), strict=True
            )
            self._made = Made.joined([self._made, *(self._clustered(k, v) for k, v in blocks)])
        self._k_BKWH, self._v_BKWV = k_BKWH[:, :, taken:], v_BKWV[:, :, taken:]
        if taken:
            self._k_BKWH, self._v_BKWV = self._k_BKWH.clone(), self._v_BKWV.clone()

    @property
    def num_alone(self) -> int:
        """Number of last tokens that are alone."""
        return self._k_BKWH.shape[2]

    @property
    def of_BKn(self) -> Tensor:  # noqa: N802
        """Cluster (B, K, n) of each slot; any one for padding."""
        batch, heads, num_clustered = self._made.of_BKn.shape
        num_made, num_alone = self._made.sizes_BKP.shape[2], self.num_slots - num_clustered
        alone_W = torch.arange(num_made, num_made + num_alone, device=self._k_BKWH.device)
        return torch.cat([self._made.of_BKn, alone_W.expand(batch, heads, -1)], dim=2)

    def sizes_BKY(self, slots: Slots) -> Tensor:  # noqa: N802
        """Number of tokens (B, K, Y) of each cluster, 0 where there is none."""
        sizes_BKP = self._made.sizes_BKP
        sizes_BKW = sizes_BKP.new_ones(*sizes_BKP.shape[:2], self._k_BKWH.shape[2])
        for row, num_pads in enumerate(slots.pads):
            sizes_BKW[row, :, : max(0, num_pads - self._made.of_BKn.shape[2])] = 0
        return torch.cat([sizes_BKP, sizes_BKW], dim=2)

    def scores(self, q_BNH: Tensor, sizes_BKY: Tensor) -> Tensor:
        """Scores (B, K, G, Y) of the mean keys, scaled, in at least float32; minus infinity where there is no token."""
        return self.scores_of(q_BNH, self._made.means_BKPH, sizes_BKY)

    def scores_of(self, q_BNH: Tensor, means_BKPH: Tensor, sizes_BKY: Tensor) -> Tensor:
        """`scores` of these mean keys and, after them, of the tokens that are alone."""
        q_BKGH = q_BNH.unflatten(1, (sizes_BKY.shape[1], -1)) * self._scaling
        scores_BKGY = torch.cat([q_BKGH @ means_BKPH.mT, q_BKGH @ self._k_BKWH.mT], dim=3)
        scores_BKGY = scores_BKGY.to(torch.promote_types(scores_BKGY.dtype, torch.float32))
        return scores_BKGY.masked_fill_((sizes_BKY == 0).unsqueeze(2), -torch.inf)

    def need_of_slots(self, need_BKY: Tensor) -> Tensor:
        """Need (B, K, n), float64, of each slot: its cluster's place from the last to the best, later tokens first."""
        place_BKY = need_BKY.argsort(dim=-1, stable=True).argsort(dim=-1).double()
        within_n = torch.arange(self.num_slots, device=need_BKY.device, dtype=torch.float64) / (2 * self.num_slots)
        return place_BKY.take_along_dim(self.of_BKn, dim=2) + within_n

    def estimate(self, scores_BKGY: Tensor, sizes_BKY: Tensor, is_estimated_BKY: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to some clusters, as if all of a cluster's tokens had its mean key and value.

        The log-sum-exp is never above that of their tokens' scores, since the exponential function is convex.

        Returns:
            output (B, N, V) and log-sum-exp (B, N), which is -inf where no cluster is estimated.
        """
        if self._softcap is not None:
            scores_BKGY = self._softcap * torch.tanh(scores_BKGY / self._softcap)
        logits_BKGY = (scores_BKGY + sizes_BKY.log().unsqueeze(2)).masked_fill(
            ~is_estimated_BKY.unsqueeze(2), -torch.inf
        )
        lse_BKG = logits_BKGY.logsumexp(dim=-1)
        weights_BKGY = (logits_BKGY - lse_BKG.unsqueeze(-1)).exp().nan_to_num_(0.0)
        values_BKYV = torch.cat([self._made.values_BKPV, self._v_BKWV], dim=2)
        out_BKGV = weights_BKGY @ values_BKYV.to(weights_BKGY.dtype)
        return out_BKGV.flatten(1, 2), lse_BKG.flatten(1, 2)

    def _of_row(self, k_BKnH: Tensor, v_BKnV: Tensor, *, pad: int) -> Made:
        """Clusters of the first slots of rows with the same padding."""
        num_slots = k_BKnH.shape[2]
        first = min(num_slots, pad + self._how.alone_first)
        parts = [self._alone(k_BKnH[:, :, pad:first], v_BKnV[:, :, pad:first])]
        for start in range(first, num_slots, RUN):
            run = slice(start, min(start + RUN, num_slots))
            parts.append(self._clustered(k_BKnH[:, :, run], v_BKnV[:, :, run]))
        made = Made.joined(parts)
        made.of_BKn = torch.cat([made.of_BKn.new_zeros(*made.of_BKn.shape[:2], pad), made.of_BKn], dim=2)
        return made

    def _alone(self, k_BKnH: Tensor, v_BKnV: Tensor) -> Made:
        """A cluster for each token."""
        shape = k_BKnH.shape[:3]
        of_BKn = torch.arange(shape[2], device=k_BKnH.device).expand(shape)
        sizes_BKn = k_BKnH.new_ones(shape, dtype=torch.float32)
        return Made(means_BKPH=k_BKnH, values_BKPV=v_BKnV, sizes_BKP=sizes_BKn, of_BKn=of_BKn)

    def _clustered(self, k_BKnH: Tensor, v_BKnV: Tensor) -> Made:
        """Clusters of similar keys."""
        batch, heads, num_tokens, _ = k_BKnH.shape
        num_clusters = -(-num_tokens // self._how.size)
        k_XnH, v_XnV = k_BKnH.flatten(0, 1), v_BKnV.flatten(0, 1)
        compared_XnH = k_XnH - k_XnH.mean(dim=1, keepdim=True) if self._how.centred else k_XnH
        of_Xn = spherical_k_means(compared_XnH, num_clusters, self._how.iterations)
        wide = torch.promote_types(k_BKnH.dtype, torch.float32)
        sizes_Xp = _sums(k_XnH.new_ones(*of_Xn.shape, 1, dtype=torch.float32), of_Xn, num_clusters).squeeze(-1)
        means_XpH, values_XpV = (
            (_sums(x.to(wide), of_Xn, num_clusters) / sizes_Xp.clamp_min(1).unsqueeze(-1)).to(x.dtype)
            for x in (k_XnH, v_XnV)
        )
        return Made(
            means_BKPH=means_XpH.unflatten(0, (batch, heads)),
            values_BKPV=values_XpV.unflatten(0, (batch, heads)),
            sizes_BKP=sizes_Xp.unflatten(0, (batch, heads)),
            of_BKn=of_Xn.unflatten(0, (batch, heads)),
        )


def rows_by_pad(pads: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows with the same padding: all at once if none is padded, else one by one."""
    return [(slice(row, row + 1), pad) for row, pad in enumerate(pads)] if any(pads) else [(slice(None), 0)]
