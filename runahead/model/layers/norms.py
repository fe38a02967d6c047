"""RMS norms by one operation, in place of the seven of a family's code: torch's own, or a kernel of ours on a CPU.

A norm is found by what it computes: x / sqrt(mean(x^2) + eps) * weight, with eps by one of its attributes. It rounds to
few bits once, where families do so twice.
"""

# Legend: B batch, C new tokens, D normed dim.

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers.fusing import Calls, FusedForward, takes_rounding
from runahead.model.parts import is_laid_out

SIZES = (1.0, 1e-3, 1e3)
"""Sizes of the numbers with which a norm is compared; beside small ones eps counts."""

TOKENS = 5

ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Largest difference between the two, relative to each number: a few roundings. In float64, in which
no norm is fused but `rms_eps` asks for eps, families compute in float32, too."""


@torch.inference_mode()
def fuse_norms(calls: Calls) -> None:
    """Fuse the RMS norms among the modules that a forward of a model has called."""
    for norm, out in calls.inner.items():
        [(name, weight_D)] = norm.named_parameters()
        if is_laid_out(weight_D) or not takes_rounding(weight_D.dtype) or isinstance(norm, nn.RMSNorm):
            continue
        if name != "weight" or out.dtype != weight_D.dtype or out.shape[-1:] != weight_D.shape:
            continue
        if (eps := rms_eps(norm, weight_D)) is not None:
            norm.forward = FusedForward(_normed, norm._parameters, weight_D.shape, eps)


@torch.inference_mode()
def rms_eps(norm: nn.Module, weight_D: Tensor) -> float | None:
    """The eps of a norm by its root mean square, with this weight; None if a module computes anything else."""
    found = [each for each in vars(norm).values() if isinstance(each, float) and 0 < each < 1]
    return next((each for each in found if _is_rms_norm(norm, weight_D, each)), None)


def _is_rms_norm(norm: nn.Module, weight_D: Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    x_BCD = torch.randn(1, TOKENS, len(weight_D), generator=generator).to(weight_D)
    for size in SIZES:
        with suppress(RuntimeError, TypeError):
            own, ours = norm.forward(x_BCD * size), F.rms_norm(x_BCD * size, weight_D.shape, weight_D, eps)
            if own.dtype == ours.dtype and torch.allclose(own, ours, rtol=ROUNDING[ours.dtype], atol=0):
                continue
        return False
    return True


def _normed(parameters: dict[str, Tensor], dims: torch.Size, eps: float, x: Tensor) -> Tensor:
    weight = parameters["weight"]
    if KERNELS.in_use and x.is_cpu and x.dtype is weight.dtype is torch.float32 and not torch.is_grad_enabled():
        return operators.rms_norm(x, weight, eps)
    return F.rms_norm(x, dims, weight, eps)
