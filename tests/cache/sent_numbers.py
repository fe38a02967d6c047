"""A plain float64 computation of what arrives of keys or values that travel in few bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sent(x: Tensor, bits: int, *, neighbours_scale: bool = False) -> Tensor:
    """Numbers (S, B, K, D) that arrive in place of these.

    Args:
        neighbours_scale: make a mistake: use the scale of the token before.
    """
    turn = spread(x.shape[-1]) if bits == 4 else torch.eye(x.shape[-1], dtype=torch.float64)
    turned, half = x.double() @ turn, (2**bits - 1) / 2
    scale = (turned.abs().amax(dim=-1, keepdim=True) / half).to(torch.bfloat16).double()
    codes = (turned / torch.where(scale == 0, 1, scale) + half).round().clamp(0, 2**bits - 1)
    return ((codes - half) * (scale.roll(1, dims=0) if neighbours_scale else scale)) @ turn.T


def spread(dim: int) -> Tensor:
    """The matrix that turns keys and values of so many channels before they are rounded to 4 bits, by its entries."""
    power = math.gcd(dim, 1 << 20)
    rest = dim // power

    def entry(row: int, column: int) -> float:
        (a, i), (b, j) = divmod(row, rest), divmod(column, rest)
        cosine = math.cos(math.pi * (i + 0.5) * j / rest) * math.sqrt((1 if j == 0 else 2) / rest)
        return (-1) ** (a & b).bit_count() / math.sqrt(power) * cosine

    return torch.tensor([[entry(row, column) for column in range(dim)] for row in range(dim)], dtype=torch.float64)
