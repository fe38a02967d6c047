"""The output projection of each attention layer: the linear map that is given what attention returns."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, t of them, V value dim, D model dim,
# X = N * V.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.attention.base import LayerAttention, Recording
from runahead.model.parts import local_part

BLOCK_VALUES = 1 << 22
"""Projected values at a time, over all rows, which bounds the memory that they take."""


def find_output_projections(
    module: nn.Module, run: Callable[[LayerAttention], None], num_layers: int, total: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Weights (D, N * V) of the layers' output projections, as views of the model's own; in 8 bits decoded when used.

    Args:
        module: the model, or a share of it, whose projections take the values of its own heads.
        run: runs one token through the model, with this attention.
        total: sum of a tensor over the ranks that share the model, all of which call it alike.

    Raises:
        ValueError: a layer has no linear map of that input. The message has no remedy.
    """
    marks_of, found = list[Tensor](), dict[int, Tensor]()

    def marks(layer: int, out_BNCV: Tensor) -> Tensor:
        """Random numbers for attention to return, by which they are found again in what modules are given."""
        generator = torch.Generator().manual_seed(layer)
        marks_BNCV = torch.randn(out_BNCV.shape, generator=generator).to(out_BNCV)
        marks_of.append(marks_BNCV.transpose(1, 2).flatten())
        return marks_BNCV

    def look(child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        layer, weight = len(marks_of) - 1, getattr(child, "weight", None)
        if layer < 0 or layer in found or not (args and isinstance(args[0], Tensor) and isinstance(weight, Tensor)):
            return
        x_X = args[0].flatten()
        if weight.ndim == 2 and x_X.shape == marks_of[layer].shape and torch.equal(x_X, marks_of[layer]):
            bias = getattr(child, "bias", None)
            own = local_part(weight)
            for is_transposed in (False, True):  # as some families store it
                if own.shape[0 if is_transposed else 1] == len(x_X):
                    weight_DX = own.mT if is_transposed else own
                    ours = total(F.linear(x_X, weight_DX))
                    ours = ours if bias is None else ours + local_part(bias)
                    scale = output.abs().max()
                    if ours.shape == output.flatten().shape and (ours - output.flatten()).abs().max() <= 0.05 * scale:
                        found[layer] = weight_DX.detach()

    hooks = [child.register_forward_hook(look) for child in module.modules() if not [*child.children()]]
    try:
        run(Recording(start=0, pads=[0], answer=marks))
    finally:
        for hook in hooks:
            hook.remove()
    if len(found) < num_layers:
        missing = next(layer for layer in range(num_layers) if layer not in found)
        raise ValueError(f"passes what attention returns to no linear map in layer {missing}")
    return [found[layer] for layer in range(num_layers)]


def projected_lengths(v_BKnV: Tensor, weight_DX: Tensor, num_heads: int, order: int = 1) -> Tensor:
    """Norm (B, N, n) of what each query head adds to the output for each stored value, at least in float32.

    Args:
        order: 1 or 2, of the norm.
    """
    batch, num_kv_heads, num_slots, value_dim = v_BKnV.shape
    wide = torch.promote_types(v_BKnV.dtype, torch.float32)
    lengths_BNn = torch.empty(batch, num_heads, num_slots, dtype=wide, device=v_BKnV.device)
    step = max(1, BLOCK_VALUES // (batch * weight_DX.shape[0]))
    for head, weight_DV in enumerate(weight_DX.split(value_dim, dim=1)):
        weight_VD, v_BnV = weight_DV.mT.to(wide), v_BKnV[:, head * num_kv_heads // num_heads]
        for first in range(0, num_slots, step):
            added_BtD = v_BnV[:, first : first + step].to(wide) @ weight_VD
            lengths_BNn[:, head, first : first + step] = added_BtD.norm(p=order, dim=-1)
    return lengths_BNn
