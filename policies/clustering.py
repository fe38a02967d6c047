"""Clusters of a text's keys, over runs of consecutive tokens; those of reused tokens may be known."""

# Legend: B batch, K kv heads, n slots, T tokens of a part, H key dim, V value dim, P clusters, X heads of all rows,
# p clusters of a run.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.k_means import add_rows, spherical_k_means
from policies.retriever import StoredPart

RUN = 8192
"""Most tokens that are clustered or summed together. Time is in proportion to a prompt's length, and temporaries are
small."""


@dataclass(kw_only=True)
class TokenClusters:
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
    def joined(cls, parts: Sequence[TokenClusters]) -> TokenClusters:
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
    def rows(cls, parts: Sequence[TokenClusters]) -> TokenClusters:
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

    def of_rows(
        self, k_BKnH: Tensor, v_BKnV: Tensor, pads: Sequence[int], parts_B: Sequence[Sequence[StoredPart]] = ()
    ) -> TokenClusters:
        """Clusters of the first slots of all rows.

        Args:
            parts_B: tokens of each row whose clusters are known; empty if there are none in any row.
        """
        num_slots = k_BKnH.shape[2]
        rows = [(slice(row, row + 1), num_pads) for row, num_pads in enumerate(pads)] if parts_B else rows_by_pad(pads)
        return TokenClusters.rows(
            [
                self._of_row(k_BKnH[of], v_BKnV[of], min(num_pads, num_slots), parts_B[of.start] if parts_B else ())
                for of, num_pads in rows
            ]
        )

    def _of_row(self, k_BKnH: Tensor, v_BKnV: Tensor, pad: int, parts: Sequence[StoredPart]) -> TokenClusters:
        """Clusters of the first slots of rows with the same padding."""
        first = min(k_BKnH.shape[2], pad + self.alone_first)
        clusters = TokenClusters.joined(
            [
                alone(k_BKnH[:, :, pad:first], v_BKnV[:, :, pad:first]),
                self.clustered(k_BKnH[:, :, first:], v_BKnV[:, :, first:], parts, first),
            ]
        )
        of_BKn = clusters.of_BKn
        clusters.of_BKn = torch.cat([of_BKn.new_zeros(*of_BKn.shape[:2], pad), of_BKn], dim=2)
        return clusters

    def clustered(
        self, k_BKnH: Tensor, v_BKnV: Tensor, parts: Sequence[StoredPart] = (), first: int = 0
    ) -> TokenClusters:
        """Clusters of similar keys. Tokens whose clusters are known stay in these, and others do not join them.

        Args:
            parts: tokens whose clusters are known, of one row.
            first: slot of the first of the given tokens.
        """
        num_tokens, num_known = k_BKnH.shape[2], 0
        if not parts:  # as while decoding, where nothing is to be copied from the host
            return self._with_means(k_BKnH, v_BKnV, self.assigned(k_BKnH), self.num_clusters(num_tokens))
        of_BKn = torch.zeros(k_BKnH.shape[:3], dtype=torch.int32, device=k_BKnH.device)
        is_other_n = torch.ones(num_tokens, dtype=torch.bool)
        for part in parts:
            at_T = part.slots_T - first
            is_here_T = (at_T >= 0) & (at_T < num_tokens)
            here_t, at_t = is_here_T.nonzero().squeeze(1), at_T[is_here_T]
            of_BKn[:, :, at_t.to(of_BKn.device)] = num_known + part.clusters_TKx[here_t.to(of_BKn.device), :, 0].T
            is_other_n[at_t] = False
            num_known += self.num_clusters(len(at_T))
        other_n = is_other_n.nonzero().squeeze(1)
        num_clusters = num_known + self.num_clusters(len(other_n))
        other_n = other_n.to(of_BKn.device)
        of_BKn[:, :, other_n] = num_known + self.assigned(k_BKnH[:, :, other_n])
        return self._with_means(k_BKnH, v_BKnV, of_BKn, num_clusters)

    def num_clusters(self, num_tokens: int) -> int:
        """Number of clusters of so many tokens."""
        return sum(-(-min(RUN, num_tokens - start) // self.size) for start in range(0, num_tokens, RUN))

    def assigned(self, k_BKnH: Tensor) -> Tensor:
        """Cluster (B, K, n) of each key, int32."""
        k_XnH, num_before = k_BKnH.flatten(0, 1), 0
        of = [torch.zeros(len(k_XnH), 0, dtype=torch.int32, device=k_XnH.device)]
        for k_XrH in k_XnH.split(RUN, dim=1) if k_XnH.shape[1] else ():
            compared_XrH = k_XrH - k_XrH.mean(dim=1, keepdim=True) if self.centred else k_XrH
            num_clusters = -(-k_XrH.shape[1] // self.size)
            of.append(spherical_k_means(compared_XrH, num_clusters, self.iterations).int() + num_before)
            num_before += num_clusters
        return torch.cat(of, dim=1).unflatten(0, k_BKnH.shape[:2])

    @staticmethod
    def _with_means(k_BKnH: Tensor, v_BKnV: Tensor, of_BKn: Tensor, num_clusters: int) -> TokenClusters:
        """Clusters of tokens of which it is known in which one each is."""
        batch, heads = k_BKnH.shape[:2]
        k_XnH, v_XnV, of_Xn = k_BKnH.flatten(0, 1), v_BKnV.flatten(0, 1), of_BKn.flatten(0, 1)
        ones_Xn1 = k_XnH.new_ones(1, dtype=torch.float32).expand(*of_Xn.shape, 1)
        sizes_Xp = _sums_by_run(ones_Xn1, of_Xn, num_clusters).squeeze(-1)
        means_XpH, values_XpV = (
            (_sums_by_run(x, of_Xn, num_clusters) / sizes_Xp.clamp_min(1).unsqueeze(-1)).to(x.dtype)
            for x in (k_XnH, v_XnV)
        )
        return TokenClusters(
            means_BKPH=means_XpH.unflatten(0, (batch, heads)),
            values_BKPV=values_XpV.unflatten(0, (batch, heads)),
            sizes_BKP=sizes_Xp.unflatten(0, (batch, heads)),
            of_BKn=of_BKn,
        )


def alone(k_BKnH: Tensor, v_BKnV: Tensor) -> TokenClusters:
    """A cluster for each token."""
    shape = k_BKnH.shape[:3]
    of_BKn = torch.arange(shape[2], device=k_BKnH.device, dtype=torch.int32).expand(shape)
    sizes_BKn = k_BKnH.new_ones(shape, dtype=torch.float32)
    return TokenClusters(means_BKPH=k_BKnH, values_BKPV=v_BKnV, sizes_BKP=sizes_BKn, of_BKn=of_BKn)


def _sums_by_run(x_XnH: Tensor, of_Xn: Tensor, num_clusters: int) -> Tensor:
    """Sum (X, p, H) of each cluster's rows, in at least float32, to which one run of rows at a time is widened."""
    sums_XpH = x_XnH.new_zeros(
        len(x_XnH), num_clusters, x_XnH.shape[2], dtype=torch.promote_types(x_XnH.dtype, torch.float32)
    )
    for x_XrH, of_Xr in zip(x_XnH.split(RUN, dim=1), of_Xn.split(RUN, dim=1), strict=True):
        add_rows(sums_XpH, x_XrH.to(sums_XpH), of_Xr.long())
    return sums_XpH


def rows_by_pad(pads: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows with the same padding: all at once if none is padded, else one by one."""
    return [(slice(row, row + 1), pad) for row, pad in enumerate(pads)] if any(pads) else [(slice(None), 0)]
