"""compressed-tensors (llm-compressor): 8-bit floating point and integers, and codes of few bits packed along columns.

Of a weight [R, C]: `weight` in 8 bits, or `weight_packed` int32 [R, C * bits / 32] with `weight_shape`, or
`weight_packed` uint8 [R, C / 2] in 4-bit floating point; `weight_scale` of the tensor, the rows, groups or blocks;
`weight_zero_point` alike, where codes are packed int32 [R * bits / 32, G]; `weight_g_idx` [C] where groups are in the
order of activations. Packed integers are stored plus 2^(bits - 1), and so are their zero points.
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns.

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.bits import FP4, along_columns, as_stored, from_table, unpack
from runahead.model.loading.quantised.packed import At, Codes, PackedWeight, Stored
from runahead.model.loading.quantised.parts import (
    FP8,
    bytes_of,
    gathered,
    require,
    require_dims,
    require_scales,
    require_shape,
    require_words,
    within,
)
from runahead.model.loading.quantised.scales import Coded, blockwise, scaled

PARTS = (
    *(".weight_packed", ".weight_global_scale", ".weight_scale", ".weight_zero_point", ".weight_shape"),
    ".weight_g_idx",
)


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    _require_plain(settings)
    schemes = [each.get("weights") or {} for each in (settings.get("config_groups") or {}).values()]
    owners, found = gathered(stored, PARTS)
    for owner, parts in owners.items():
        name, stored_bytes = f"{owner}.weight", bytes_of(*parts.values())
        if ".weight_packed" in parts:
            require(owner, parts, (".weight_packed", ".weight_scale", *_needed(schemes)))
            packed = _of_floats if parts[".weight_packed"].get_dtype() == "U8" else _of_integers
            found[name] = packed(owner, parts, schemes)
        elif name not in found:
            raise ValueError(f"{owner}{next(iter(parts))} is stored without {name}")
        else:
            require(owner, {".weight": found[name]} | parts, (".weight_scale", *_needed(schemes)))
            stored_bytes += bytes_of(found[name])
            found[name] = _in_bytes(owner, found[name], parts, schemes)
        found[name].stored_bytes = stored_bytes
    raw = [
        name for name, part in found.items() if not isinstance(part, PackedWeight) and part.get_dtype() in (*FP8, "I8")
    ]
    if raw:
        raise ValueError(f"{raw[0]} is stored in 8 bits without its scale")
    return found


def _require_plain(settings: Any) -> None:
    """Check that weights are the model's, whole, and not turned. Raises: ValueError."""
    sparsity = (settings.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise ValueError(f"its weights are sparse ({sparsity}), which is not read; take one that is not")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ValueError("its activations are transformed (transform_config), which is not done; take another one")


def _needed(schemes: list[Any]) -> list[str]:
    """Parts that a weight has by each of the schemes: without them its numbers would be others."""
    has_zeros = schemes and all(scheme.get("symmetric") is False for scheme in schemes)
    is_ordered = schemes and all(scheme.get("actorder") in ("group", "dynamic") for scheme in schemes)
    return [*([".weight_zero_point"] if has_zeros else []), *([".weight_g_idx"] if is_ordered else [])]


def _in_bytes(owner: str, weight: Any, parts: dict[str, Any], schemes: list[Any]) -> PackedWeight:
    require_dims(f"{owner}.weight", weight)
    if weight.get_dtype() not in (*FP8, "I8"):
        raise ValueError(f"{owner}.weight is stored as {weight.get_dtype()} beside a scale, which it is not in need of")
    name = f"{owner}.weight"
    coded = Coded(name=name, shape=tuple(weight.get_shape()), bits=8, codes=as_stored(weight), stored=(weight,))
    scale = parts[".weight_scale"]
    block = _block(coded, scale, schemes)
    zeros = None
    if ".weight_zero_point" in parts:
        require_shape(f"{owner}.weight_zero_point", parts[".weight_zero_point"], scale.get_shape(), name)
        zeros, _ = blockwise(coded, f"{owner}.weight_zero_point", parts[".weight_zero_point"], block)
    return scaled(coded, f"{owner}.weight_scale", scale, block, zeros=zeros, order=_order(owner, parts, coded.shape))


def _of_integers(owner: str, parts: dict[str, Any], schemes: list[Any]) -> PackedWeight:
    require(owner, parts, (".weight_packed", ".weight_shape"))
    packed, scale, name = parts[".weight_packed"], parts[".weight_scale"], f"{owner}.weight_packed"
    require_dims(name, packed, most=2)
    require_words(name, packed)
    require_shape(f"{owner}.weight_shape", parts[".weight_shape"], [2], name)
    num_rows, num_cols = (int(each) for each in within(parts[".weight_shape"]))
    known = sorted({int(each["num_bits"]) for each in schemes if each.get("num_bits")})
    fitting = [each for each in known if packed.get_shape() == [num_rows, ceil(num_cols * each / 32)]]
    if not fitting:
        require_shape(name, packed, [num_rows, ceil(num_cols * (known or [4])[0] / 32)], f"{owner}.weight_shape")
    bits = fitting[0]
    codes = along_columns(packed, bits)
    step = 32 // bits if 32 % bits == 0 else 32
    shape = (num_rows, num_cols)
    coded = Coded(name=name, shape=shape, bits=bits, codes=codes, steps=(1, step), stored=(packed,))
    middle = torch.full((1, 1), 2 ** (bits - 1))
    block = _block(coded, scale, schemes)

    def zeros(at: At, rows: range) -> Tensor:
        if ".weight_zero_point" not in parts:
            return middle.expand(len(rows), num_groups)
        words = within(parts[".weight_zero_point"]).T
        missing = 0 if 32 % bits == 0 else -words.shape[1] % bits
        return unpack(torch.nn.functional.pad(words, (0, missing)), bits)[:, rows.start : rows.stop].T

    weight = scaled(coded, f"{owner}.weight_scale", scale, block, zeros=zeros, order=_order(owner, parts, coded.shape))
    num_groups = ceil(num_cols / weight.group_size)
    if ".weight_zero_point" in parts:
        wanted = [ceil(num_rows * bits / 32), num_groups]
        require_words(f"{owner}.weight_zero_point", parts[".weight_zero_point"])
        require_shape(f"{owner}.weight_zero_point", parts[".weight_zero_point"], wanted, name)
    return weight


def _of_floats(owner: str, parts: dict[str, Any], schemes: list[Any]) -> PackedWeight:
    """4-bit floating point: NVFP4 (scales in 8 bits, divided by one of the tensor) and MXFP4 (exponents)."""
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    require_dims(f"{owner}.weight_packed", packed)
    *lead, half = packed.get_shape()
    codes: Codes = from_table(packed, torch.tensor(FP4))
    shape = (*lead, half * 2)
    coded = Coded(name=f"{owner}.weight_packed", shape=shape, bits=4, codes=codes, steps=(1, 2), stored=(packed,))
    weight = scaled(coded, f"{owner}.weight_scale", scale, _block(coded, scale, schemes))
    if ".weight_global_scale" in parts:
        of_groups, divisor = weight.scales, parts[".weight_global_scale"]
        require_scales(f"{owner}.weight_global_scale", divisor)
        weight.scales = lambda at, rows: of_groups(at, rows) / within(divisor).float().reshape(1, 1)
    return weight


def _order(owner: str, parts: dict[str, Any], shape: tuple[int, ...]) -> Any:
    g_idx = parts.get(".weight_g_idx")
    if g_idx is None:
        return None
    require_shape(f"{owner}.weight_g_idx", g_idx, [shape[-1]], f"{owner}.weight")
    return lambda: within(g_idx)


def _block(coded: Coded, scale: Any, schemes: list[Any]) -> tuple[int, ...]:
    """Rows and columns of a block, by the config: that of its schemes which the shape of the scales fits.

    Where none fits, the first one is what the error names; empty where scales are per tensor or row.
    """
    shape, strategies = scale.get_shape(), {scheme.get("strategy") for scheme in schemes}
    rowwise, (num_rows, num_cols) = strategies <= {"channel", "token"} and bool(strategies), coded.shape[-2:]
    if shape[-2:] == [num_rows, 1] or shape == [num_rows]:
        return ()
    if shape in ([], [1]) or shape[-2:] == [1, 1]:
        return (1, num_cols) if rowwise else ()
    found = [(1, num_cols)] if rowwise else []
    for scheme in schemes:
        height, width = 1, scheme.get("group_size")
        structure = scheme.get("block_structure")
        if structure:
            height, width = (int(each) for each in (structure.split("x") if isinstance(structure, str) else structure))
        if width and width > 0:
            found.append((height, int(width)))
    fitting = [
        block
        for block in found
        if shape[-2:] == [ceil(size / each) for size, each in zip(coded.shape[-2:], block, strict=True)]
    ]
    return next(iter(fitting or found), ())
