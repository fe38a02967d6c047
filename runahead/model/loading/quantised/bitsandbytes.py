"""bitsandbytes: 4-bit codes of a table (nf4, fp4) with scales of numbers one after another, and 8-bit integers.

Of a weight [R, C] in 4 bits: `weight` uint8 [R * C / 2, 1], the high code of a byte first; `weight.quant_map`, the 16
numbers; `weight.absmax`, the scales, or with `weight.nested_*` codes of these; `weight.quant_state.*`, the rest (JSON).
In 8 bits: `weight` int8 [R, C] and `SCB` [R], 127 times the scales.
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns, n numbers.

from __future__ import annotations

import json
import re
from math import ceil, gcd, prod
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.bits import as_stored, looked_up, pairs_of
from runahead.model.loading.quantised.packed import At, PackedWeight, Stored
from runahead.model.loading.quantised.parts import (
    bytes_of,
    require,
    require_dims,
    require_number,
    require_scales,
    require_shape,
    within,
)
from runahead.model.loading.quantised.scales import Coded, scaled

STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(\w+)")
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
ROW_MAJOR = 0
OF_127 = 7.874015718698502e-3
"""1 / 127, as bitsandbytes multiplies by it."""


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    found = dict(stored)
    for name in stored:
        if match := STATE.fullmatch(name):
            owner = match[1]
            parts = {part: found.pop(owner + part) for part in PARTS if owner + part in found}
            found[owner] = _in_4_bits(owner, {"": found.get(owner)} | parts, found.pop(name))
        elif name.endswith(".SCB"):
            owner = name.removesuffix(".SCB")
            found[f"{owner}.weight"] = _in_8_bits(owner, found, found.pop(name))
    raw = [name for name, part in found.items() if name.endswith((*PARTS, ".weight_format")) or _is_raw(part)]
    if raw:
        raise ValueError(f"{raw[0]} is stored without {raw[0].removesuffix('.weight')}.quant_state or SCB beside it")
    return found


def _is_raw(part: Any) -> bool:
    return not isinstance(part, PackedWeight) and part.get_dtype() in ("I8", "U8")


def _in_8_bits(owner: str, found: dict[str, Any], scale: Any) -> PackedWeight:
    weight, order = found.get(f"{owner}.weight"), found.pop(f"{owner}.weight_format", None)
    if weight is None or weight.get_dtype() != "I8":
        raise ValueError(f"{owner}.SCB is stored without {owner}.weight in 8 bits")
    require_dims(f"{owner}.weight", weight, most=2)
    if order is not None:
        require_number(f"{owner}.weight_format", order)
    if order is not None and int(within(order).reshape(-1)[0]) != ROW_MAJOR:
        raise ValueError(f"{owner}.weight is laid out for a kernel (weight_format); save it with a newer bitsandbytes")
    shape = tuple(weight.get_shape())
    require_shape(f"{owner}.SCB", scale, [shape[0]], f"{owner}.weight")
    coded = Coded(name=f"{owner}.weight", shape=shape, bits=8, codes=as_stored(weight), stored=(weight,))
    return scaled(coded, f"{owner}.SCB", scale, factor=OF_127)


def _in_4_bits(name: str, parts: dict[str, Any], state: Any) -> PackedWeight:
    require_number(f"{name}.quant_state", state)
    try:
        about = json.loads(bytes(within(state).tolist()))
        shape, group = tuple(int(each) for each in about["shape"]), int(about["blocksize"])
        natural = getattr(torch, about["dtype"])
        _, num_cols = shape
        size_of_group = int(about.get("nested_blocksize", 1))
        offset = float(about.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}.quant_state cannot be read ({type(error).__name__})") from error
    nested = ".nested_absmax" in parts
    present = {part: stored for part, stored in parts.items() if stored is not None}
    require(name, {".quant_state": state} | present, ("", *PARTS[: 4 if nested else 2]))
    packed, absmax = parts[""], parts[".absmax"]
    num_groups = ceil(prod(shape) / group)
    require_shape(name, packed, [ceil(prod(shape) / 2), 1], f"{name}.quant_state")
    require_shape(f"{name}.absmax", absmax, [num_groups], f"{name}.quant_state")
    require_shape(f"{name}.quant_map", parts[".quant_map"], [16], f"{name}.quant_state")
    for part in (*PARTS[:2], *(PARTS[2:] if nested else ())):
        require_scales(f"{name}{part}", parts[part])
    if nested:
        wanted = [ceil(num_groups / size_of_group)]
        require_shape(f"{name}.nested_absmax", parts[".nested_absmax"], wanted, f"{name}.quant_state")
    in_rows = num_cols % group == 0

    def codes(at: At, rows: range, cols: range) -> Any:
        data = packed[rows.start * num_cols // 2 : ceil(rows.stop * num_cols / 2)].flatten()
        pairs = pairs_of(within(parts[".quant_map"]), high_first=True)

        def numbers(first: int, last: int) -> Tensor:
            begin, end = first * num_cols // 2, ceil(last * num_cols / 2)
            return looked_up(pairs, data[None, begin:end])[0, : (last - first) * num_cols].view(-1, num_cols)

        return numbers

    def scales(at: At, rows: range) -> Tensor:
        begin, end = rows.start * num_cols, rows.stop * num_cols
        first, last = begin // group, ceil(end / group)
        numbers_n = absmax[first:last]
        if nested:
            outer = within(parts[".nested_absmax"])[torch.arange(first, last) // size_of_group]
            numbers_n = within(parts[".nested_quant_map"])[numbers_n.int()] * outer + offset
        if in_rows:
            return numbers_n.view(len(rows), -1)
        return numbers_n.repeat_interleave(group)[begin - first * group : end - first * group].view(len(rows), -1)

    return PackedWeight(
        shape=shape,
        bits=4,
        codes=codes,
        scales=scales,
        group_size=group if in_rows else 1,
        steps=(2 // gcd(2, num_cols), num_cols),
        natural=natural,
        stored_bytes=bytes_of(*present.values()),
    )
