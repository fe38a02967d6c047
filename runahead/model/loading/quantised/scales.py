"""Scales of a weight by their shape: of the tensor, of each row, of groups of columns, or of blocks."""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.packed import At, Codes, PackedWeight
from runahead.model.loading.quantised.parts import (
    bytes_of,
    dtype_of,
    exponents,
    require_number,
    require_scales,
    require_shape,
    rows_of,
    within,
)


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A weight's codes: its name, and `shape`, `bits`, `codes` and `steps` as of `PackedWeight`."""

    name: str
    shape: tuple[int, ...]
    bits: int
    codes: Codes
    steps: tuple[int, int] = (1, 1)
    stored: tuple[Any, ...] = ()


def scaled(coded: Coded, scale_name: str, scale: Any, block: tuple[int, ...] = (), **others: Any) -> PackedWeight:
    """A weight with its scales.

    Args:
        scale: a number, one per row, or [..., R / r, C / c] for blocks of r rows and c columns (of which the last may
            be smaller), as floating-point numbers or exponents.
        block: rows and columns of a block; empty where the shape of the scales tells.
        others: further fields of the `PackedWeight`.

    Raises:
        ValueError: the scales have another shape.
    """
    require_scales(scale_name, scale)
    scales, group_size = blockwise(coded, scale_name, scale, block)
    return PackedWeight(
        shape=coded.shape,
        bits=coded.bits,
        codes=coded.codes,
        steps=coded.steps,
        scales=scales,
        group_size=group_size,
        natural=dtype_of(scale),
        stored_bytes=bytes_of(*coded.stored, scale),
        **others,
    )


def blockwise(
    coded: Coded, name: str, numbers: Any, block: tuple[int, ...] = ()
) -> tuple[Callable[[At, range], Tensor], int]:
    """A function that reads scales (or zero points) of rows, [R, G], and the columns of a group. Raises: ValueError."""
    shape, (*lead, num_rows, num_cols) = numbers.get_shape(), coded.shape
    require_number(name, numbers)
    if len(shape) < 2 and not block:
        if shape not in ([], [1]):
            require_shape(name, numbers, [num_rows], coded.name)
        of_row = len(shape) == 1 and shape[0] == num_rows

        def of_rows(at: At, rows: range) -> Tensor:
            read = within(numbers, slice(rows.start, rows.stop)) if of_row else within(numbers)
            return exponents(read).reshape(-1, 1).expand(len(rows), 1)

        return of_rows, num_cols
    sizes, grid = (num_rows, num_cols), shape[-2:]
    if not block or shape[:-2] != lead or _grid(sizes, block) != grid:
        if block or shape[:-2] != lead or any(size % count for size, count in zip(sizes, grid, strict=True)):
            require_shape(name, numbers, [*lead, *_grid(sizes, block or (1, num_cols))], coded.name)
        block = tuple(size // count for size, count in zip(sizes, grid, strict=True))
    height, width = block

    def of_blocks(at: At, rows: range) -> Tensor:
        first = rows.start // height
        read = exponents(rows_of(numbers, at, range(first, ceil(rows.stop / height))))
        return read if height == 1 else read[torch.arange(rows.start, rows.stop) // height - first]

    return of_blocks, width


def _grid(sizes: tuple[int, int], block: tuple[int, ...]) -> list[int]:
    return [ceil(size / of_block) for size, of_block in zip(sizes, block, strict=True)]
