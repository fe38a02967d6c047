"""Vectors of the same tokens in two layers, with one direction for both and lengths of their own.

From MiniCache (Liu et al., NeurIPS 2024, arXiv 2405.14366), per KV head: a token with the vectors x and y, at an angle
Omega, gets the direction e = sin((1 - t) Omega) / sin(Omega) x / |x| + sin(t Omega) / sin(Omega) y / |y| and is read as
|x| e and |y| e. Tokens at the largest angles are exact.
"""

# Legend: B rows, K kv heads, n tokens, S tokens of a block, m exact tokens, D key or value dim.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.precision import widened

BLOCK_TOKENS = 512
"""Tokens that are merged at a time: vectors are in at least float32 meanwhile."""

PARALLEL = 1e-4
"""Sine of an angle below which directions are interpolated along the line between them."""


@dataclass(frozen=True, kw_only=True)
class SharedDirections:
    """Keys or values of some tokens in a lower and an upper layer. Never changed in place, so that copies share it.

    Attributes:
        vectors_BKnD: directions; of an exact token the lower layer's vector.
        lengths_BKn2: by which each layer multiplies them, in at least float32; 1 for an exact token in the lower layer.
        exact_BKm: the exact tokens (int32).
        upper_BKmD: their vectors in the upper layer.
    """

    vectors_BKnD: Tensor
    lengths_BKn2: Tensor
    exact_BKm: Tensor
    upper_BKmD: Tensor

    @classmethod
    def merge(
        cls, lower_BKnD: Tensor, upper_BKnD: Tensor, *, towards_upper: float, exact_share: float
    ) -> SharedDirections:
        """Merge the vectors of both layers.

        Args:
            towards_upper: t, the share of the angle from the lower layer's vector to the direction.
            exact_share: of all tokens, those at the largest angles.
        """
        blocks = zip(*(x_BKnD.split(BLOCK_TOKENS, dim=2) for x_BKnD in (lower_BKnD, upper_BKnD)), strict=True)
        parts = [_merged(x_BKSD, y_BKSD, towards_upper) for x_BKSD, y_BKSD in blocks]
        vectors_BKnD, lengths_BKn2, angles_BKn = (torch.cat(list(each), dim=2) for each in zip(*parts, strict=True))
        num_exact = num_exact_of(lower_BKnD.shape[2], exact_share)
        # A stable sort takes the earlier of equal ones, wherever padding has moved them.
        exact_BKm = angles_BKn.sort(dim=-1, descending=True, stable=True).indices[..., :num_exact]
        index_BKmD = exact_BKm[..., None].expand(*exact_BKm.shape, lower_BKnD.shape[3])
        vectors_BKnD.scatter_(2, index_BKmD, lower_BKnD.gather(2, index_BKmD))
        lengths_BKn2[..., 0].scatter_(2, exact_BKm, 1.0)
        return cls(
            vectors_BKnD=vectors_BKnD,
            lengths_BKn2=lengths_BKn2,
            exact_BKm=exact_BKm.int(),
            upper_BKmD=upper_BKnD.gather(2, index_BKmD),
        )

    @classmethod
    def bytes_of(cls, num_tokens: int, dim: int, dtype: torch.dtype, exact_share: float) -> int:
        """Bytes of this many tokens of one head of one row, merged together."""
        num_exact = num_exact_of(num_tokens, exact_share)
        vectors = (num_tokens + num_exact) * dim * dtype.itemsize
        return vectors + 2 * num_tokens * torch.promote_types(dtype, torch.float32).itemsize + num_exact * 4

    @property
    def num_tokens(self) -> int:
        return self.vectors_BKnD.shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.vectors_BKnD, self.lengths_BKn2, self.exact_BKm, self.upper_BKmD))

    def followed_by(self, later: SharedDirections) -> SharedDirections:
        """With more tokens after these."""
        if not self.num_tokens:
            return later
        return SharedDirections(
            vectors_BKnD=torch.cat([self.vectors_BKnD, later.vectors_BKnD], dim=2),
            lengths_BKn2=torch.cat([self.lengths_BKn2, later.lengths_BKn2], dim=2),
            exact_BKm=torch.cat([self.exact_BKm, later.exact_BKm + self.num_tokens], dim=2),
            upper_BKmD=torch.cat([self.upper_BKmD, later.upper_BKmD], dim=2),
        )

    def read(self, *, upper: bool) -> Tensor:
        """The vectors (B, K, n, D) in either layer."""
        read_BKnD = (self.vectors_BKnD * self.lengths_BKn2[..., int(upper), None]).to(self.vectors_BKnD.dtype)
        if upper:
            index_BKmD = self.exact_BKm.long()[..., None].expand_as(self.upper_BKmD)
            read_BKnD.scatter_(2, index_BKmD, self.upper_BKmD)
        return read_BKnD


def _merged(x_BKSD: Tensor, y_BKSD: Tensor, towards_y: float) -> tuple[Tensor, Tensor, Tensor]:
    """Directions (B, K, S, D), lengths (B, K, S, 2) and angles (B, K, S) of some tokens."""
    both_BKS2D = widened(torch.stack([x_BKSD, y_BKSD], dim=3))
    units_x, units_y = _units(both_BKS2D).unbind(dim=3)
    angles_BKS = angles(units_x, units_y)
    directions_BKSD = interpolated(units_x, units_y, angles_BKS, towards_y)
    return directions_BKSD.to(x_BKSD.dtype), both_BKS2D.norm(dim=-1), angles_BKS


def num_exact_of(num_tokens: int, exact_share: float) -> int:
    """Number of exact tokens of so many."""
    return round(exact_share * num_tokens)


def angles(x_BKnD: Tensor, y_BKnD: Tensor) -> Tensor:
    """Angles (B, K, n) in radians between unit vectors, precise for small ones, too, where an arc cosine is not."""
    return 2 * torch.atan2((x_BKnD - y_BKnD).norm(dim=-1), (x_BKnD + y_BKnD).norm(dim=-1))


def interpolated(x_BKnD: Tensor, y_BKnD: Tensor, angles_BKn: Tensor, towards_y: float) -> Tensor:
    """Unit vectors (B, K, n, D) at this share of the angle from x to y (SLERP)."""
    sines_BKn = angles_BKn.sin()
    is_line_BKn = sines_BKn < PARALLEL
    divisors_BKn = sines_BKn.masked_fill(is_line_BKn, 1)
    from_x_BKn, from_y_BKn = (
        torch.where(is_line_BKn, share, (share * angles_BKn).sin() / divisors_BKn)
        for share in (1 - towards_y, towards_y)
    )
    # Of unit length already, unless one of the two is zero or they are on a line.
    return _units(from_x_BKn[..., None] * x_BKnD + from_y_BKn[..., None] * y_BKnD)


def _units(x: Tensor) -> Tensor:
    """Vectors of length 1 in the direction of these; zero stays zero."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
