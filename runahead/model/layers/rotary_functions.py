"""Rotary embeddings of queries and keys in one pass, on a CPU.

The attention of most families rotates by a function of their file, `apply_rotary_pos_emb`. A module whose forward calls
one that computes x * cos + (-x2, x1) * sin, with the halves of x, gets a copy of that forward that calls ours: the same
code with another function behind this name, also within decorators.
"""

# Legend: B batch, N query heads, K kv heads, C tokens, H head dim.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from types import CellType, FunctionType, MethodType
from typing import Any, cast

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
        forward: Any = type(child).forward
        inner = unwrap(forward)
        if "forward" in vars(child) or not isinstance(inner, FunctionType) or NAME not in inner.__code__.co_names:
            continue
        own = inner.__globals__.get(NAME)
        if isinstance(own, FunctionType) and _is_rotation(own) and (found := _with(forward, own)) is not None:
            child.forward = FusedForward(MethodType(found, child))


@cache
def _with(forward: FunctionType, own: Rotation) -> FunctionType | None:
    """The forward of a class with our rotation in place of its own; None if a decorator holds it as we do not know."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:
        cells = getattr(forward, "__closure__", None) or ()  # a decorator may be any callable
        places = [place for place, cell in enumerate(cells) if _holds(cell, inner)]
        found = _with(inner, own)
        if found is None or len(places) != 1:
            return None
        held = (*cells[: places[0]], CellType(found), *cells[places[0] + 1 :])
        decorated: Any = _copy(forward, forward.__globals__, held)
        decorated.__wrapped__ = found  # for what asks for the signature
        return cast(FunctionType, decorated)
    names = {**forward.__globals__, NAME: _rotation(own)}
    return _copy(forward, names, forward.__closure__)


def _holds(cell: CellType, what: object) -> bool:
    try:
        return cell.cell_contents is what
    except ValueError:  # it is empty
        return False


def _copy(function: FunctionType, names: dict[str, Any], cells: tuple[CellType, ...] | None) -> FunctionType:
    """A function with other globals and another closure."""
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    found.__kwdefaults__ = function.__kwdefaults__
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
