"""Spherical k-means: clusters of keys by direction."""

# Legend: n keys, H key dim, X heads of all rows, p clusters.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from policies.precision import widened


def spherical_k_means(k_XnH: Tensor, num_clusters: int, iterations: int) -> Tensor:
    """Cluster (X, n) of each key by direction, of `num_clusters` with evenly spaced starts. Some may be empty."""
    k_XnH = normalize(widened(k_XnH), dim=-1)
    starts = torch.arange(num_clusters, device=k_XnH.device) * k_XnH.shape[1] // num_clusters
    centers_XpH = k_XnH[:, starts]
    for _ in range(iterations):
        of_Xn = (k_XnH @ centers_XpH.mT).argmax(dim=-1)
        sums_XpH = add_rows(torch.zeros_like(centers_XpH), k_XnH, of_Xn)
        is_empty = sums_XpH.norm(dim=-1, keepdim=True) == 0
        centers_XpH = torch.where(is_empty, centers_XpH, normalize(sums_XpH, dim=-1))
    return (k_XnH @ centers_XpH.mT).argmax(dim=-1)


def add_rows(sums_XpH: Tensor, x_XnH: Tensor, of_Xn: Tensor) -> Tensor:
    """Add each row to the sum of its cluster, in place."""
    return sums_XpH.scatter_add_(1, of_Xn[..., None].expand_as(x_XnH), x_XnH)
