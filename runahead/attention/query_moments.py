"""Mean and covariance of a layer's queries before RoPE, from which cache policies expect the queries to come."""

# Legend: B batch, N query heads, C new tokens, H head dim.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.rotary import Rotary

QUERY_BLOCK = 1024
"""Queries that are turned back to position 0 at a time, which bounds the memory that this takes."""


@dataclass(frozen=True, kw_only=True)
class QueryMoments:
    """Number, mean and scatter of some queries of each row, in at least float32.

    Sets of queries are merged exactly, around their own means, since queries may be far longer than they differ (Chan,
    Golub and LeVeque, 1979).

    Attributes:
        count_B: number of queries.
        mean_BNH: their mean.
        scatter_BNHH: sum of the outer products of their deviations from the mean.
    """

    count_B: Tensor
    mean_BNH: Tensor
    scatter_BNHH: Tensor

    @classmethod
    def from_queries(cls, q_BNCH: Tensor, rotary: Rotary, *, positions_BC: Tensor, counts_BC: Tensor) -> QueryMoments:
        """Moments of rotated queries before their rotation.

        Args:
            positions_BC: positions to which the queries are rotated.
            counts_BC: whether a query counts; those of padding do not.
        """
        wide = torch.promote_types(q_BNCH.dtype, torch.float32)
        found: QueryMoments | None = None
        for first in range(0, q_BNCH.shape[2], QUERY_BLOCK):
            block = slice(first, first + QUERY_BLOCK)
            q_BNqH = rotary.turned(q_BNCH[:, :, block].to(wide), -positions_BC[:, block])
            counts_B1q1 = counts_BC[:, None, block, None].to(wide)
            count_B = counts_B1q1.sum(dim=(1, 2, 3))
            mean_BN1H = (q_BNqH * counts_B1q1).sum(dim=2, keepdim=True) / count_B.clamp_min(1)[:, None, None, None]
            off_BNqH = (q_BNqH - mean_BN1H) * counts_B1q1
            moments = cls(count_B=count_B, mean_BNH=mean_BN1H[:, :, 0], scatter_BNHH=off_BNqH.mT @ off_BNqH)
            found = moments if found is None else found.merged(moments)
        assert found is not None, q_BNCH.shape
        return found

    def without(self, goes_B: Tensor) -> QueryMoments:
        """Moments without the queries of the rows for which `goes_B` is true."""
        return QueryMoments(
            count_B=self.count_B.masked_fill(goes_B, 0),
            mean_BNH=self.mean_BNH.masked_fill(goes_B[:, None, None], 0),
            scatter_BNHH=self.scatter_BNHH.masked_fill(goes_B[:, None, None, None], 0),
        )

    def row(self, row: int) -> QueryMoments:
        """Moments of the queries of one row."""
        rows = slice(row, row + 1)
        return QueryMoments(
            count_B=self.count_B[rows], mean_BNH=self.mean_BNH[rows], scatter_BNHH=self.scatter_BNHH[rows]
        )

    def merged(self, other: QueryMoments) -> QueryMoments:
        """Moments of the queries of both."""
        count_B = self.count_B + other.count_B
        share_B11 = (other.count_B / count_B.clamp_min(1))[:, None, None]
        delta_BNH = other.mean_BNH - self.mean_BNH
        between_BNHH = delta_BNH[..., :, None] * delta_BNH[..., None, :]
        weight_B111 = (self.count_B[:, None, None] * share_B11)[..., None]
        return QueryMoments(
            count_B=count_B,
            mean_BNH=self.mean_BNH + share_B11 * delta_BNH,
            scatter_BNHH=self.scatter_BNHH + other.scatter_BNHH + weight_B111 * between_BNHH,
        )

    def ahead(self, rotary: Rotary, start_B: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Mean (B, N, H) and covariance (B, N, H, H) after the mean of the rotations to the next positions.

        Args:
            start_B: the first of these positions in each row.
        """

        def turned(x_BNXH: Tensor) -> Tensor:
            return rotary.turned_by_mean(x_BNXH, start_B, num_positions)

        covariance_BNHH = self.scatter_BNHH / self.count_B.clamp_min(1)[:, None, None, None]
        return turned(self.mean_BNH[:, :, None])[:, :, 0], turned(turned(covariance_BNHH).mT)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.count_B.nbytes + self.mean_BNH.nbytes + self.scatter_BNHH.nbytes
