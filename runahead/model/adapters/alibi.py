"""ALiBi slopes (Press et al., 2022): head n of N = 2^k heads has slope 2^(-8 n / N), n = 1 .. N."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Slopes (num_heads) in float32.

    With a number of heads that is not a power of two, the slopes are those of the next lower power, followed by every
    other slope of the next higher one, as in BLOOM and Falcon.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * n / lower for n in range(1, lower + 1)]
    exponents += [4.0 * n / lower for n in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32, device=device)
