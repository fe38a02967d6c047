"""8-bit floating point with scales per tensor or per block, as transformers and DeepSeek store it (`fp8`, `mxfp8`).

Beside a weight [..., R, C] in F8_E4M3 is its scale, under one of the names `SCALES`: a number, or [..., R / r, C / c]
for blocks of r x c numbers, the last of which may be smaller. Scales of 8 bits are exponents of two (E8M0).
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight.

from __future__ import annotations

from typing import Any

import torch

from runahead.model.loading.quantised.bits import FP4, as_stored, from_table
from runahead.model.loading.quantised.packed import PackedWeight, Stored
from runahead.model.loading.quantised.parts import FP8, gathered, is_float, require_dims
from runahead.model.loading.quantised.scales import Coded, scaled

SCALES = ("_scale_inv", ".qscale_weight", ".scale")


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    block = settings.get("weight_block_size") or ()
    is_read = isinstance(block, list | tuple) and len(block) in (0, 2)
    if not is_read or not all(type(each) is int and each > 0 for each in block):
        raise ValueError(
            f"weight_block_size={ascii(block)[:40]} of its settings is not the rows and columns of a block"
        )
    return with_scales(stored, SCALES, tuple(block))


def with_scales(stored: Stored, endings: tuple[str, ...], block: tuple[int, ...]) -> dict[str, Any]:
    """The weights in 8 bits with their scales, and all other tensors as they are.

    Args:
        block: rows and columns of a block; empty where only the shape of the scales tells.

    Raises:
        ValueError: a weight has no scale, or one of another shape.
    """
    owners, found = gathered(stored, endings)
    for owner, parts in owners.items():
        [(ending, scale), *_] = parts.items()
        names = (owner, f"{owner}.weight")
        name = next((each for each in names if each in found), None)
        if name is None and not is_float(scale):
            raise ValueError(f"{owner}{ending} is stored without the weight that it belongs to")
        weight = scale if name is None else found[name]
        if name is None or is_float(weight):  # such as a parameter of the model that is called a scale
            found[owner + ending] = scale
        else:
            found[name] = scaled(coded(name, weight), owner + ending, scale, block)
    raw = [name for name, part in found.items() if not isinstance(part, PackedWeight) and part.get_dtype() in FP8]
    if raw:
        raise ValueError(f"{raw[0]} is stored in 8 bits without its scale")
    return found


def coded(name: str, weight: Any) -> Coded:
    """The codes of a weight: 8-bit floating point, or in integers of 8 bits two of 4-bit floating point each."""
    require_dims(name, weight)
    *lead, num_cols = weight.get_shape()
    if weight.get_dtype() not in (*FP8, "I8", "U8"):
        raise ValueError(f"{name} is stored as {weight.get_dtype()} beside a scale, and is read in 8 bits alone")
    if weight.get_dtype() in FP8:
        return Coded(name=name, shape=(*lead, num_cols), bits=8, codes=as_stored(weight), stored=(weight,))
    codes = from_table(weight, torch.tensor(FP4))
    return Coded(name=name, shape=(*lead, num_cols * 2), bits=4, codes=codes, steps=(1, 2), stored=(weight,))
