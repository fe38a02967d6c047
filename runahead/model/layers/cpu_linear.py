"""Linear layers on a CPU whose products PyTorch would compute slower than the processor can.

In float32 PyTorch calls MKL, which has less than half of oneDNN's speed on processors of other makers than its own, for
many rows and for one alike. oneDNN is given the weights as they lie. A row has the same result beside any other rows
but alone. Layers that are fused compute many rows by a kernel of ours, if it is in use, which reads weights as they
lie, too: 1.1 times as fast for a thousand rows, 1.3 times for 64. There a row has the same result beside any others, if
they are many.

In bfloat16 a product of few rows, as decoding makes them (one row per prompt of the batch), takes as long as reading
the weight. For `x @ W.T` oneDNN brings the weight into another layout first, at every call. `(W @ x.T).T` is the same
product, and reads the weight as it lies: it takes 0.6 to 0.9 of the time up to 64 rows.
"""

# Legend: R rows, I input features, O output features.

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.kernels import operators
from runahead.kernels.operators import KERNELS

MOST_ROWS = 64
"""Largest number of rows for which a bfloat16 weight is the left factor."""

MANY_ROWS = 64
"""Least number of rows of which a kernel of ours computes products, if it is in use."""

KERNEL_ROUNDING = 1e-4
"""Largest difference of its products from those of oneDNN, relative to the largest: some hundred roundings."""


def multiply_fast(module: nn.Module) -> None:
    """Let the linear layers of a model on a CPU multiply as described above, where they are of PyTorch's class."""
    for child in module.modules():
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and is_faster(child.weight.dtype):
            child.__class__ = CPULinear


def is_faster(dtype: torch.dtype) -> bool:
    """Whether products on a CPU with weights of a dtype are computed otherwise than by PyTorch's own choice."""
    return dtype is torch.bfloat16 or library(dtype) == "onednn"


def library(dtype: torch.dtype) -> str:
    """The library of many rows' products with weights of a dtype on a CPU: "onednn", or "torch" for its own choice."""
    return "onednn" if dtype is torch.float32 and takes_onednn() else "torch"


@cache
def takes_onednn() -> bool:
    """Whether float32 products are oneDNN's on this processor, as its maker and PyTorch's libraries decide.

    It is not measured: ranks, and runs, would take one or the other by chance, and round unlike.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    return maker() not in ("", "GenuineIntel") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def maker() -> str:
    """Who made this x86 processor, such as AuthenticAMD; "" if it is another processor, or not known."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return ""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "vendor_id"), "")


@contextmanager
def by_pytorch(module: nn.Module) -> Iterator[None]:
    """Context manager in which the linear layers of a model multiply by PyTorch's own choice."""
    found: list[nn.Module] = [child for child in module.modules() if type(child) is CPULinear]
    for child in found:
        child.__class__ = nn.Linear
    try:
        yield
    finally:
        for child in found:
            child.__class__ = CPULinear


class CPULinear(nn.Linear):
    """`nn.Linear` that multiplies as described above. What it does depends on dtype and number of rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.weight) is not nn.Parameter:  # sharded weights have another type
            return super().forward(x)
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product (..., O) of a linear layer on a CPU with a tensor (..., I), contiguous."""
    is_float32 = x.dtype is torch.float32 and weight_OI.dtype is torch.float32
    if is_float32 and not torch.is_grad_enabled() and takes_onednn():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
        return out
    num_rows = x.numel() // x.shape[-1]
    if weight_OI.dtype is torch.bfloat16 and 0 < num_rows <= MOST_ROWS:
        return _multiply_few_rows(x, num_rows, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def multiply_fused(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`multiply` for layers that are fused: many rows by a kernel of ours, if it is in use."""
    if takes_kernel(x, weight_OI, bias_O):
        found = by_kernel(
            x,
            lambda x: operators.linear(x, weight_OI, bias_O),
            lambda x: multiply(x, weight_OI, bias_O),
            (*weight_OI.shape, bias_O is not None),
        )
        if found is not None:
            return found
    return multiply(x, weight_OI, bias_O)


def takes_kernel(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a kernel of ours computes products of a tensor (..., I) with these, where oneDNN would otherwise.

    It reads rows of weights whose numbers lie beside each other, which those of a tied, transposed matrix do not.
    """
    if (
        not KERNELS.in_use
        or torch.is_grad_enabled()
        or not x.is_cpu
        or x.numel() < MANY_ROWS * x.shape[-1]
        or not x.numel()
    ):
        return False
    numbers = [x, *(each for each in parameters if each is not None)]
    is_float32 = all(each.dtype is torch.float32 for each in numbers)
    return is_float32 and all(each.is_contiguous() for each in numbers[1:]) and takes_onednn()


def by_kernel(
    x: Tensor, kernel: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], kind: tuple[object, ...]
) -> Tensor | None:
    """The product of a tensor (..., I) by a kernel of ours; None, with a warning once, if it is wrong.

    Its first product of a kind is compared with the plain one, on some of the rows.

    Args:
        kind: of weights, such as their sizes.
    """
    if kind not in KERNELS.compared:
        rows = x.reshape(-1, x.shape[-1])[-MANY_ROWS:]
        found, wanted = kernel(rows), plain(rows)
        finite = wanted[wanted.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        is_right = torch.allclose(found, wanted, rtol=0, atol=KERNEL_ROUNDING * largest, equal_nan=True)
        KERNELS.compared[kind] = is_right
        if not is_right:
            off = float((found - wanted).abs().max())
            warnings.warn(
                f"a product by kernels of our own is off by {off:.3g}, where numbers are up to {largest:.3g}; oneDNN "
                f"computes those of this kind instead ({', '.join(map(str, kind))})",
                stacklevel=2,
            )
    return kernel(x) if KERNELS.compared[kind] else None


def _multiply_few_rows(x: Tensor, num_rows: int, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product with the weight as the left factor."""
    if num_rows == 1:
        x_I = x.flatten()
        out_O = torch.mv(weight_OI, x_I) if bias_O is None else torch.addmv(bias_O, weight_OI, x_I)
        return out_O.view(*x.shape[:-1], -1)
    x_IR = x.reshape(num_rows, -1).t()
    out_OR = weight_OI @ x_IR if bias_O is None else torch.addmm(bias_O[:, None], weight_OI, x_IR)
    return out_OR.t().contiguous().view(*x.shape[:-1], -1)
