"""Clusters of clusters: the coarse level of an index with two levels."""

# Legend: B batch, K kv heads, P clusters, Z coarse clusters, H key dim, X heads of all rows.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.clustering import TokenClusters
from policies.k_means import spherical_k_means
from policies.precision import widened

ITERATIONS = 20
"""Iterations of k-means over the means of clusters."""


@dataclass(frozen=True, kw_only=True)
class CoarseClusters:
    """Clusters by direction of the mean keys of clusters.

    Attributes:
        means_BKZH: mean keys of their tokens; 0 in empty ones.
        sizes_BKZ: number of tokens.
        of_BKP: coarse cluster of each cluster.
    """

    means_BKZH: Tensor
    sizes_BKZ: Tensor
    of_BKP: Tensor

    @classmethod
    def from_clusters(cls, clusters: TokenClusters, size: int, first: int = 0) -> CoarseClusters:
        """Cluster clusters, from the one with number `first` on, `size` of them together on average."""
        means_BKPH, sizes_BKP = clusters.means_BKPH[:, :, first:], clusters.sizes_BKP[:, :, first:]
        batch, heads, num_clusters, _ = means_BKPH.shape
        num_coarse = -(-num_clusters // size)
        of_BKP = spherical_k_means(means_BKPH.flatten(0, 1), num_coarse, ITERATIONS).unflatten(0, (batch, heads))
        sizes_BKZ = sizes_BKP.new_zeros(batch, heads, num_coarse).scatter_add_(2, of_BKP, sizes_BKP)
        sums_BKPH = widened(means_BKPH) * sizes_BKP[..., None]
        sums_BKZH = sums_BKPH.new_zeros(batch, heads, num_coarse, means_BKPH.shape[3])
        sums_BKZH.scatter_add_(2, of_BKP[..., None].expand_as(sums_BKPH), sums_BKPH)
        means_BKZH = (sums_BKZH / sizes_BKZ.clamp_min(1).unsqueeze(3)).to(means_BKPH.dtype)
        return cls(means_BKZH=means_BKZH, sizes_BKZ=sizes_BKZ, of_BKP=of_BKP)

    def joined(self, later: CoarseClusters) -> CoarseClusters:
        """These and the coarse clusters of later clusters."""
        return CoarseClusters(
            means_BKZH=torch.cat([self.means_BKZH, later.means_BKZH], dim=2),
            sizes_BKZ=torch.cat([self.sizes_BKZ, later.sizes_BKZ], dim=2),
            of_BKP=torch.cat([self.of_BKP, later.of_BKP + self.sizes_BKZ.shape[2]], dim=2),
        )

    @property
    def num_bytes(self) -> int:
        return self.means_BKZH.nbytes + self.sizes_BKZ.nbytes + self.of_BKP.nbytes
