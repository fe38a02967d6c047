"""Products of few rows with a bfloat16 weight on a CPU, as decoding makes them: one row per prompt of the batch.

A product of few rows takes as long as reading the weight. For `x @ W.T`, which `nn.Linear` computes, oneDNN brings the
weight into another layout first, at every call. `(W @ x.T).T` is the same product, and reads the weight as it lies: it
takes 0.6 to 0.9 of the time up to 64 rows. In float32 a decoding step gains nothing by it.
"""

# Legend: R rows, I input features, O output features.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 64
"""Largest number of rows for which the weight is the left factor."""


def multiply_few_rows_fast(module: nn.Module) -> None:
    """Let the bfloat16 linear layers of a model on a CPU multiply few rows as described above."""
    for child in module.modules():
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype is torch.bfloat16:
            child.__class__ = FewRowsLinear


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that chooses the order of the factors by the input's number of rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.weight) is not nn.Parameter:  # sharded weights have another type
            return super().forward(x)
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product of a linear layer (..., O), contiguous, with the weight as the left factor for few rows (..., I)."""
    num_rows = x.numel() // x.shape[-1]
    if not 0 < num_rows <= MOST_ROWS:
        return F.linear(x, weight_OI, bias_O)
    if num_rows == 1:
        x_I = x.flatten()
        out_O = torch.mv(weight_OI, x_I) if bias_O is None else torch.addmv(bias_O, weight_OI, x_I)
        return out_O.view(*x.shape[:-1], -1)
    x_IR = x.reshape(num_rows, -1).t()
    out_OR = weight_OI @ x_IR if bias_O is None else torch.addmm(bias_O[:, None], weight_OI, x_IR)
    return out_OR.t().contiguous().view(*x.shape[:-1], -1)
