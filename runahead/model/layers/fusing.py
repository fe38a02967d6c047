"""Modules of a model that are computed by fewer operations than the family's code has (`model.fuse`).

They are found by structure, in a forward of one token: linear layers of one module that are given the same tensor one
after another (`products.py`), gated MLPs (`gated.py`) and RMS norms (`norms.py`). Only `forward` of such a module is
replaced, on the instance: classes, names, parameters and hooks stay, and with `apart` the family's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runahead.config import Fuse
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers.cpu_linear import CPULinear, by_pytorch


class FusedForward(partial[Any]):
    """The `forward` of a module in place of its own.

    Attributes:
        multiplied: input features of the product, or input and inner features of the gated MLP, of which a kernel of
            ours computes many rows, if it is in use; () where none does.
    """

    multiplied: tuple[int, ...] = ()


class Calls:
    """Calls of modules that may be fused, in one forward.

    Attributes:
        linears: linear layers in order, each with the tensor that it was given.
        inner: modules with a single parameter of one dim, which are given one tensor alone, and an output of each.
        of_three: modules with three linear layers of their own, which are given one tensor alone.
    """

    def __init__(self) -> None:
        self.linears: list[tuple[Tensor, nn.Linear]] = []
        self.inner: dict[nn.Module, Tensor] = {}
        self.of_three: list[nn.Module] = []


@contextmanager
def watching(module: nn.Module) -> Iterator[Calls]:
    """Context manager that notes which modules a forward calls, and with what.

    Modules whose instance has a forward of its own, by code of the model or hooks of other libraries, are left out:
    with `apart` their class would compute in its place.
    """
    calls = Calls()

    def linear(child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if len(args) == 1 and not keywords:
            assert isinstance(child, nn.Linear)
            calls.linears.append((args[0], child))

    def inner(child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and not keywords and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.inner[child] = output

    def of_three(child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and not keywords and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.of_three.append(child)

    hooks = []
    for child in module.modules():
        if "forward" in vars(child):
            continue
        if type(child) in (nn.Linear, CPULinear):
            hooks.append(child.register_forward_pre_hook(linear, with_kwargs=True))
        elif [parameter.ndim for parameter in child.parameters()] == [1] and not [*child.children()]:
            hooks.append(child.register_forward_hook(inner, with_kwargs=True))
        elif sum(isinstance(each, nn.Linear) for each in child.children()) == 3:
            hooks.append(child.register_forward_hook(of_three, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def is_fused(module: nn.Module) -> bool:
    """Whether any module in a model is fused."""
    return any(isinstance(vars(child).get("forward"), FusedForward) for child in module.modules())


def kernel_bytes(module: nn.Module, num_threads: int | None = None) -> int:
    """Most memory in bytes that threads keep for products of many rows of a model by kernels of ours.

    Args:
        num_threads: that compute; None: as many as now.
    """
    own = (vars(child).get("forward") for child in module.modules())
    sizes = {each.multiplied for each in own if isinstance(each, FusedForward) and each.multiplied}
    if not KERNELS.in_use or not sizes:
        return 0
    return (num_threads or torch.get_num_threads()) * max(operators.kept_bytes(*each) for each in sizes)


def unfuse(module: nn.Module) -> dict[nn.Module, FusedForward]:
    """Have all modules in a model run the family's own code; returns what did in their place."""
    own = [(child, vars(child).get("forward")) for child in module.modules()]
    fused = {child: forward for child, forward in own if isinstance(forward, FusedForward)}
    for child in fused:
        del child.forward
    return fused


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Context manager in which all modules in a model run the family's own code, with products by PyTorch's choice."""
    fused = unfuse(module)
    try:
        with by_pytorch(module):
            yield
    finally:
        for child, forward in fused.items():
            child.forward = forward


def is_wanted(fuse: Fuse, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether modules of a whole model are fused where they can be."""
    return fuse is Fuse.on or (fuse is Fuse.auto and device.type == "cpu" and dtype is torch.float32)


def takes_rounding(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype may be fused: float64 is for those who want the family's own bits."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16)
