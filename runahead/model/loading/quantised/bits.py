"""Codes of few bits that lie one after another in words or bytes, the lowest bits first."""

# Legend: R rows, C columns, n words.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.packed import At, Codes

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the sixteen codes of 4-bit floating point (E2M1, OCP Microscaling Formats 1.0, table 5)."""


def unpack(words_n: Tensor, bits: int) -> Tensor:
    """Codes in words of 32 bits, along the last dim: 32 of them in each `bits` words.

    Args:
        words_n: int32 [..., n]; n is a multiple of `bits` where codes cross words (3, 5, 6, 7 bits).

    Returns:
        uint8 [..., n * 32 / bits].
    """
    if bits in (1, 2, 4, 8):
        # A matrix of one column is contiguous in whatever order it lies.
        return unpack_bytes(words_n.clone(memory_format=torch.contiguous_format).view(torch.uint8), bits)
    words = words_n.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF
    begins = torch.arange(32) * bits
    word, offset = begins // 32, begins % 32
    codes = words[..., word] >> offset
    following = words[..., (word + 1).clamp_max(bits - 1)] << (32 - offset)
    codes |= torch.where(offset + bits > 32, following, 0)
    return (codes & (2**bits - 1)).to(torch.uint8).flatten(-2)


def unpack_bytes(bytes_n: Tensor, bits: int) -> Tensor:
    """Codes in bytes, along the last dim: uint8 [..., n * 8 / bits]. `bits` divides 8."""
    if bits == 8:
        return bytes_n
    mask = 2**bits - 1
    shifted = [(bytes_n >> shift if shift else bytes_n) & mask for shift in range(0, 8, bits)]
    return torch.stack(shifted, dim=-1).flatten(-2)


def as_stored(part: Any) -> Codes:
    """Codes that are stored as numbers, of the weight's shape."""

    def read(at: At, rows: range, cols: range) -> Any:
        numbers = whole(part, at, rows, cols)
        if numbers.dtype.itemsize > 1 or not numbers.is_floating_point():
            return lambda first, last: numbers[first:last]
        # torch converts 8-bit floating point ten times slower than a table of two codes does.
        if numbers.shape[1] % 2 == 0:
            pairs, data = _pairs_in_8_bits(numbers.dtype), numbers.view(torch.uint16)
            return lambda first, last: looked_up(pairs, data[first:last])
        table, data = _in_8_bits(numbers.dtype), numbers.view(torch.uint8)
        return lambda first, last: looked_up(table, data[first:last])

    return read


def _in_8_bits(dtype: torch.dtype) -> Tensor:
    """The numbers of the 256 codes of 8-bit floating point."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@cache
def _pairs_in_8_bits(dtype: torch.dtype) -> Tensor:
    """The two numbers of each 16 bits, in float32, side by side in a float64: [65536]."""
    numbers, codes = _in_8_bits(dtype), torch.arange(2**16)
    return torch.stack([numbers[codes & 255], numbers[codes >> 8]], dim=1).view(torch.float64).flatten()


def along_columns(part: Any, bits: int) -> Codes:
    """Codes in words of 32 bits along a weight's columns: int32 [..., R, C * bits / 32]."""

    def read(at: At, rows: range, cols: range) -> Any:
        words = whole(part, at, rows, range(cols.start * bits // 32, -(-cols.stop * bits // 32)))
        missing = 0 if 32 % bits == 0 else -words.shape[1] % bits
        if missing:
            words = torch.nn.functional.pad(words, (0, missing))
        return lambda first, last: unpack(words[first:last], bits)[:, : len(cols)]

    return read


def from_table(part: Any, table: Tensor) -> Codes:
    """Numbers of 4-bit codes, of which a byte holds two, the low one first: uint8 [..., R, C / 2]."""

    def read(at: At, rows: range, cols: range) -> Any:
        data = whole(part, at, rows, range(cols.start // 2, -(-cols.stop // 2))).view(torch.uint8)
        pairs = pairs_of(table)
        return lambda first, last: looked_up(pairs, data[first:last])[:, : len(cols)]

    return read


def pairs_of(table: Tensor, *, high_first: bool = False) -> Tensor:
    """The two numbers of each byte, in float32, side by side in a float64: [256]."""
    codes = torch.arange(256)
    low_high = torch.stack([table[codes & 15], table[codes >> 4]], dim=1).float()
    return (low_high.flip(1) if high_first else low_high).contiguous().view(torch.float64).flatten()


def looked_up(table: Tensor, data: Tensor) -> Tensor:
    """The numbers that codes stand for: [R, n] -> float32 [R, n], or [R, 2n] of a table of pairs."""
    found = table.index_select(0, data.flatten().int())
    return found.view(torch.float32).view(data.shape[0], -1)


def whole(part: Any, at: At, rows: range, cols: range) -> Tensor:
    """Rows and columns of a stored tensor, as a matrix."""
    index = (*(slice(each, each + 1) for each in at), slice(rows.start, rows.stop), slice(cols.start, cols.stop))
    read: Tensor = part[index]
    return read.flatten(0, -2) if at else read
