"""GPTQ: codes along columns in words, transposed; scales and zero points per group, in the order of `g_idx`.

Of a weight [R, C]: qweight int32 [C * bits / 32, R], scales [G, R], qzeros int32 [G, R * bits / 32], g_idx [C]. In the
first version of the format zero points are stored less one (AutoGPTQ); `checkpoint_format: gptq_v2` stores them as
they are (GPTQModel).
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns, n words.

from __future__ import annotations

from math import ceil
from typing import Any

from torch import Tensor

from runahead.model.loading.quantised.bits import unpack
from runahead.model.loading.quantised.packed import At, PackedWeight, Stored
from runahead.model.loading.quantised.parts import (
    bytes_of,
    columns_of_group,
    dtype_of,
    gathered,
    require,
    require_matrices,
    require_scales,
    require_shape,
    whole_number,
)

PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    layout = settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"its GPTQ weights are laid out for a kernel ({layout}); take one with checkpoint_format=gptq")
    owners, found = gathered(stored, PARTS)
    for owner, parts in owners.items():
        require_matrices(owner, parts, PARTS[:3], words=PARTS[:2])
        found[f"{owner}.weight"] = _weight(owner, parts, settings, 1 if layout == "gptq" else 0)
    return found


def _weight(owner: str, parts: dict[str, Any], settings: Any, offset: int) -> PackedWeight:
    qweight, qzeros, scales = (parts[name] for name in PARTS[:3])
    require_scales(f"{owner}.scales", scales)
    num_groups, num_rows = scales.get_shape()
    bits = qzeros.get_shape()[1] * 32 // num_rows  # a module may have others than the config says
    if bits not in (2, 3, 4, 8):
        known = whole_number(settings, "bits", "w_bit")
        require_shape(f"{owner}.qzeros", qzeros, [num_groups, num_rows * known // 32], f"{owner}.scales")
        raise ValueError(f"{owner} has {bits} bits, and weights are read in 2, 3, 4 or 8")
    num_cols = qweight.get_shape()[0] * 32 // bits
    group_size = columns_of_group(settings, num_cols, "group_size", "q_group_size")
    require_shape(f"{owner}.qweight", qweight, [num_cols * bits // 32, num_rows], f"{owner}.scales")
    require_shape(f"{owner}.qzeros", qzeros, [num_groups, num_rows * bits // 32], f"{owner}.scales")
    require_shape(
        f"{owner}.scales", scales, [ceil(num_cols / group_size), num_rows], f"a group of {group_size} columns"
    )
    g_idx = parts.get(".g_idx")
    if g_idx is not None:
        require_shape(f"{owner}.g_idx", g_idx, [num_cols], f"{owner}.qweight")
    elif settings.get("desc_act") and num_groups > 1:
        require(owner, parts, PARTS)

    def codes(at: At, rows: range, cols: range) -> Any:
        words = qweight[cols.start * bits // 32 : cols.stop * bits // 32, rows.start : rows.stop].T.contiguous()
        return lambda first, last: unpack(words[first:last], bits)

    def zeros(at: At, rows: range) -> Tensor:
        return (unpack(qzeros[...], bits)[:, rows.start : rows.stop].T + offset) & (2**bits - 1)

    return PackedWeight(
        shape=(num_rows, num_cols),
        bits=bits,
        codes=codes,
        scales=lambda at, rows: scales[:, rows.start : rows.stop].T,
        zeros=zeros,
        group_size=group_size,
        order=None if g_idx is None else lambda: g_idx[...],
        steps=(1, 32 if bits == 3 else 32 // bits),
        natural=dtype_of(scales),
        stored_bytes=bytes_of(*parts.values()),
    )
