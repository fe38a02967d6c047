"""Precision in which scores and sums are computed."""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
