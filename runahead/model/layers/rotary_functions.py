"""Rotary embeddings of queries and keys in one pass, on a CPU.

The attention of most families rotates by a function of their file, `apply_rotary_pos_emb`. A module whose forward calls
one that computes x * cos + (-x2, x1) * sin, with the halves of x, gets a copy of that forward that calls ours: the same
code with another function behind this name.
"""

# Legend: B batch, N query heads, K kv heads, C tokens, H head dim.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers.fusing import FusedForward

NAME = "apply_rotary_pos_emb"
ROUNDING = 1e-6
HEADS, TOKENS, HEAD_DIM = (4, 2), 5, 32

Rotation = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotations(module: nn.Module) -> None:
    """Fuse the rotary embeddings of a model's attention, where the kernels of our own are in use."""
    if not KERNELS.in_use:
        return
    for child in module.modules():
        forward = type(child).forward
        if "forward" in vars(child) or not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        own = forward.__globals__.get(NAME)
        if isinstance(own, FunctionType) and _is_rotation(own):
            child.forward = FusedForward(MethodType(_with(forward, own), child))


@cache
def _with(forward: FunctionType, own: Rotation) -> FunctionType:
    """The forward of a class with our rotation in place of its own."""
    names = {**forward.__globals__, NAME: _rotation(own)}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _rotation(own: Rotation) -> Rotation:
    def rotated(q_BNCH: Tensor, k_BKCH: Tensor, cos_BCH: Tensor, sin_BCH: Tensor, *args: Any, **keywords: Any) -> Any:
        is_plain = not (args or keywords or torch.is_grad_enabled())
        if is_plain and operators.rotates(q_BNCH, k_BKCH, cos_BCH, sin_BCH):
            return operators.rotate(q_BNCH, k_BKCH, cos_BCH, sin_BCH)
        return own(q_BNCH, k_BKCH, cos_BCH, sin_BCH, *args, **keywords)

    return rotated


@cache
def _is_rotation(own: Rotation) -> bool:
    """Whether a function computes just that, of any angles."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, TOKENS, HEAD_DIM, generator=generator) for heads in HEADS)
    cos, sin = torch.randn(2, 2, TOKENS, HEAD_DIM, generator=generator)
    try:
        found = own(q, k, cos, sin)
        pairs = list(zip(found, (_rotated(q, cos, sin), _rotated(k, cos, sin)), strict=True))
    except Exception:  # another family's function may take anything
        return False
    return all(theirs.shape == ours.shape and torch.allclose(theirs, ours, atol=ROUNDING) for theirs, ours in pairs)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
