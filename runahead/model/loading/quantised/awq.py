"""AWQ: codes along rows in words, transposed and interleaved; scales and zero points per group.

Of a weight [R, C]: qweight int32 [C, R / 8], qzeros int32 [G, R / 8], scales [G, R]. Of the eight codes of a word the
one at bits 4i is that of row `ORDER[i]` (AutoAWQ, `WQLinear_GEMM`).
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns.

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.packed import At, PackedWeight, Stored
from runahead.model.loading.quantised.parts import (
    bytes_of,
    columns_of_group,
    dtype_of,
    gathered,
    require_matrices,
    require_scales,
    require_shape,
)

PARTS = (".qweight", ".qzeros", ".scales")
BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", BITS))
    if version != "gemm" or bits != BITS:
        raise ValueError(f"its AWQ weights are in version {version} with {bits} bits; take one in version gemm, 4 bits")
    owners, found = gathered(stored, PARTS)
    for owner, parts in owners.items():
        require_matrices(owner, parts, PARTS, words=PARTS[:2])
        found[f"{owner}.weight"] = _weight(owner, parts, settings)
    return found


def _weight(owner: str, parts: dict[str, Any], settings: Any) -> PackedWeight:
    qweight, qzeros, scales = (parts[name] for name in PARTS)
    require_scales(f"{owner}.scales", scales)
    num_groups, num_rows = scales.get_shape()
    num_cols = qweight.get_shape()[0]
    group_size = columns_of_group(settings, num_cols, "group_size", "q_group_size")
    require_shape(f"{owner}.qweight", qweight, [num_cols, num_rows // PER_WORD], f"{owner}.scales")
    require_shape(f"{owner}.qzeros", qzeros, [num_groups, num_rows // PER_WORD], f"{owner}.scales")
    require_shape(
        f"{owner}.scales", scales, [ceil(num_cols / group_size), num_rows], f"a group of {group_size} columns"
    )

    def codes(at: At, rows: range, cols: range) -> Any:
        words = qweight[cols.start : cols.stop, rows.start // PER_WORD : rows.stop // PER_WORD].T.contiguous()
        return lambda first, last: _in_order(words[first // PER_WORD : last // PER_WORD])

    def zeros(at: At, rows: range) -> Tensor:
        return _in_order(qzeros[:, rows.start // PER_WORD : rows.stop // PER_WORD].T)

    return PackedWeight(
        shape=(num_rows, num_cols),
        bits=BITS,
        codes=codes,
        scales=lambda at, rows: scales[:, rows.start : rows.stop].T,
        zeros=zeros,
        group_size=group_size,
        steps=(PER_WORD, 1),
        natural=dtype_of(scales),
        stored_bytes=bytes_of(*parts.values()),
    )


def _in_order(words: Tensor) -> Tensor:
    """Codes of words of eight rows: [R / 8, n] -> [R, n]."""
    codes = torch.empty(words.shape[0], PER_WORD, words.shape[1], dtype=torch.uint8)
    for place, row in enumerate(ORDER):
        codes[:, row] = (words >> (BITS * place)) & 15
    return codes.flatten(0, 1)
