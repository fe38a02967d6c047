"""A quantised weight that is decoded when a part of it is asked for, in place of a stored tensor (`sharing.Parts`)."""

# Legend: R rows (outputs) and C columns (inputs) of a weight, G groups of columns.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**17
"""Elements that are decoded at a time: they stay in the caches of a core."""

At = tuple[int, ...]
"""Indices of the dims before the last two, such as an expert's."""

Stored = Mapping[str, Any]
"""Slice objects of safetensors by name."""

Codes = Callable[[At, range, range], Callable[[int, int], Tensor]]
"""Reads the codes of rows and columns, and returns a function that unpacks rows of these, from one to another:
[rows, columns], of any numeric type."""

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(kw_only=True)
class PackedWeight:
    """A weight of codes, scales and zero points: each number is (code - zero) * scale * `factor`, in float32.

    The result is rounded once, to `dtype`.

    Attributes:
        shape: of the weight, as the model has it.
        bits: of a code.
        codes: reads the codes.
        scales: reads the scales of rows: [R, G], in any floating-point type, or a view that expands to it.
        zeros: reads the zero points of rows: [R, G] of integers; None for zero.
        group_size: columns of a group; the last may have fewer.
        order: reads the group of each column ("act order"); None if column c is in group c // group_size.
        steps: rows and columns at whose multiples codes can be read.
        factor: by which a product is multiplied, after it was rounded to float32.
        natural: the dtype in which the format's own library has the weight.
        stored_bytes: of its parts in the file.
        dtype: of what is read.
        name: in the file, for error messages.
    """

    shape: tuple[int, ...]
    bits: int
    codes: Codes
    scales: Callable[[At, range], Tensor]
    zeros: Callable[[At, range], Tensor] | None = None
    group_size: int
    order: Callable[[], Tensor] | None = None
    steps: tuple[int, int] = (1, 1)
    factor: float | None = None
    natural: torch.dtype = torch.float32
    stored_bytes: int
    dtype: torch.dtype = torch.float32
    name: str = ""

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return next(code for code, dtype in FLOATS.items() if dtype == self.dtype)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        *lead, rows, cols = ranges_of(index, self.shape)
        out = torch.empty([len(each) for each in (*lead, rows, cols)], dtype=self.dtype)
        if out.numel():
            places = product(*lead)
            for at, into in zip(places, out.view(-1, len(rows), len(cols)), strict=True):
                self._decode(at, rows, cols, into)
        return out

    def _decode(self, at: At, rows: range, cols: range, into: Tensor) -> None:
        wide_rows, wide_cols = (
            around(each, step, size) for each, step, size in zip((rows, cols), self.steps, self.shape[-2:], strict=True)
        )
        codes = self.codes(at, wide_rows, wide_cols)
        scale = _Scaling(self, at, wide_rows, wide_cols)
        is_whole = (wide_rows, wide_cols) == (rows, cols) and into.dtype == torch.float32
        step = self.steps[0]
        # One for all: the first touch of a page of new memory takes the time of decoding it.
        block = None if is_whole else torch.empty(rows_of_block(wide_rows, len(wide_cols), step), len(wide_cols))
        for first, last in blocks(wide_rows, len(wide_cols), step):
            weight = into[first:last] if block is None else block[: last - first]
            weight.copy_(codes(first, last))
            scale(weight, first, last)
            begin, end = max(first, rows.start - wide_rows.start), min(last, rows.stop - wide_rows.start)
            if block is not None and begin < end:
                offset = wide_rows.start - rows.start
                of_cols = slice(cols.start - wide_cols.start, cols.stop - wide_cols.start)
                into[begin + offset : end + offset] = weight[begin - first : end - first, of_cols]

    @cached_property
    def groups(self) -> Tensor | None:
        """The group of each column, where it is not c // group_size. Raises: ValueError."""
        if self.order is None:
            return None
        groups, num_cols = self.order().long(), self.shape[-1]
        num_groups = ceil(num_cols / self.group_size)
        if groups.min() < 0 or groups.max() >= num_groups:
            raise ValueError(f"{self.name}: its g_idx names group {int(groups.max())}, and it has {num_groups} groups")
        return None if torch.equal(groups, torch.arange(num_cols) // self.group_size) else groups


class _Scaling:
    """Applies scales and zero points to codes of some rows and columns."""

    def __init__(self, weight: PackedWeight, at: At, rows: range, cols: range) -> None:
        self._factor = weight.factor
        scales_RG = weight.scales(at, rows).float()
        zeros_RG = None if weight.zeros is None else weight.zeros(at, rows).float()
        groups, size = weight.groups, weight.group_size
        first, last = cols.start // size, ceil(cols.stop / size)
        self._size: int | None = size
        if last - first == 1:
            self._size = len(cols)
        if groups is None and (last - first == 1 or (cols.start % size == 0 and len(cols) % size == 0)):
            select: Any = slice(first, last)
        else:
            groups = torch.arange(weight.shape[-1]) // size if groups is None else groups
            select, self._size = groups[cols.start : cols.stop], None
        self._select = select
        self._scales_RG, self._zeros_RG = scales_RG, zeros_RG

    def __call__(self, weight_RC: Tensor, first: int, last: int) -> None:
        """Make numbers of codes, in place: those of rows from `first` to `last`, in float32."""
        view = weight_RC if self._size is None else weight_RC.unflatten(1, (-1, self._size))
        for numbers, apply in ((self._zeros_RG, view.sub_), (self._scales_RG, view.mul_)):
            if numbers is not None:
                if self._size is None:
                    apply(numbers[first:last].index_select(1, self._select))
                else:
                    apply(numbers[first:last, self._select].unsqueeze(2))
        if self._factor is not None:
            weight_RC.mul_(self._factor)


def ranges_of(index: Any, shape: tuple[int, ...]) -> list[range]:
    """The range of each dim that an index names: slices of step 1, or an Ellipsis in place of some."""
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in given:
        place = given.index(Ellipsis)
        given[place : place + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    given += [slice(None)] * (len(shape) - len(given))
    ranges = [range(*each.indices(size)) for each, size in zip(given, shape, strict=True)]
    assert all(each.step == 1 for each in ranges), index
    return ranges


def around(inner: range, step: int, size: int) -> range:
    """The smallest range around another one that begins and ends at multiples of `step`, or at the end."""
    return range(inner.start // step * step, min(ceil(inner.stop / step) * step, size))


def rows_of_block(rows: range, num_cols: int, step: int) -> int:
    """Rows of a block of about `BLOCK` elements."""
    return min(max(1, BLOCK // max(1, num_cols * step)) * step, len(rows))


def blocks(rows: range, num_cols: int, step: int) -> Iterator[tuple[int, int]]:
    """Blocks of about `BLOCK` elements, as (first, last) from the beginning of `rows`."""
    size = rows_of_block(rows, num_cols, step)
    for first in range(0, len(rows), size):
        yield first, min(first + size, len(rows))
