"""Clusters of keys by direction: spherical k-means, over runs of consecutive tokens."""

# Legend: B batch, K kv heads, n slots, H key dim, V value dim, P clusters, X heads of all rows, p clusters of a run.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

RUN = 8192
"""Most tokens that are clustered together, so that the cost is in proportion to the length of the prompt."""


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

    def of_rows(self, k_BKnH: Tensor, v_BKnV: Tensor, pads: Sequence[int]) -> Made:
        """Clusters of the first slots of all rows."""
        num_slots = k_BKnH.shape[2]
        return Made.rows(
            [
                self._of_row(k_BKnH[rows], v_BKnV[rows], pad=min(num_pads, num_slots))
                for rows, num_pads in rows_by_pad(pads)
            ]
        )

    def _of_row(self, k_BKnH: Tensor, v_BKnV: Tensor, *, pad: int) -> Made:
        """Clusters of the first slots of rows with the same padding."""
        num_slots = k_BKnH.shape[2]
        first = min(num_slots, pad + self.alone_first)
        parts = [alone(k_BKnH[:, :, pad:first], v_BKnV[:, :, pad:first])]
        for start in range(first, num_slots, RUN):
            run = slice(start, min(start + RUN, num_slots))
            parts.append(self.clustered(k_BKnH[:, :, run], v_BKnV[:, :, run]))
        made = Made.joined(parts)
        made.of_BKn = torch.cat([made.of_BKn.new_zeros(*made.of_BKn.shape[:2], pad), made.of_BKn], dim=2)
        return made

    def clustered(self, k_BKnH: Tensor, v_BKnV: Tensor) -> Made:
        """Clusters of similar keys."""
        batch, heads, num_tokens, _ = k_BKnH.shape
        num_clusters = -(-num_tokens // self.size)
        k_XnH, v_XnV = k_BKnH.flatten(0, 1), v_BKnV.flatten(0, 1)
        compared_XnH = k_XnH - k_XnH.mean(dim=1, keepdim=True) if self.centred else k_XnH
        of_Xn = spherical_k_means(compared_XnH, num_clusters, self.iterations)
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
            of_BKn=of_Xn.int().unflatten(0, (batch, heads)),
        )


def alone(k_BKnH: Tensor, v_BKnV: Tensor) -> Made:
    """A cluster for each token."""
    shape = k_BKnH.shape[:3]
    of_BKn = torch.arange(shape[2], device=k_BKnH.device, dtype=torch.int32).expand(shape)
    sizes_BKn = k_BKnH.new_ones(shape, dtype=torch.float32)
    return Made(means_BKPH=k_BKnH, values_BKPV=v_BKnV, sizes_BKP=sizes_BKn, of_BKn=of_BKn)


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


def rows_by_pad(pads: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows with the same padding: all at once if none is padded, else one by one."""
    return [(slice(row, row + 1), pad) for row, pad in enumerate(pads)] if any(pads) else [(slice(None), 0)]
