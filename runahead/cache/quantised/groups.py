"""Keys or values in 8, 4 or 2 bits: groups of 32 numbers, each with a scale and a zero point, in packed bytes.

The asymmetric quantisation of KIVI (Liu et al., ICML 2024, arXiv 2402.02750): zero = min x, scale = (max x - min x) /
(2^bits - 1), code = round((x - zero) / scale). A group is 32 tokens of one channel or 32 channels of one token.

Products with codes need no dequantised numbers: with x = scale * code + zero, q x = (q * scale) code + q zero.
"""

# Legend: B rows, K kv heads, G query heads of a KV head, T stored tokens, S tokens of a block, M chosen tokens,
# D key or value dim, g groups of tokens, F groups of channels, W bytes of a token's codes.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.precision import widened

GROUP = 32
"""Numbers that share a scale and a zero point."""

BLOCK_TOKENS = 512
"""Tokens of a head that are unpacked at a time; a multiple of GROUP."""

SCALE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Groups(ABC):
    """Quantised keys or values of some tokens. It is never changed in place, so that copies of a cache share it.

    Attributes:
        bits: of a code.
        dim: D.
        codes_BKTW: byte w of a token holds the codes of the channels w, w + W, w + 2W, ..., the first in its low bits.
        scale, zero: of each group, in 16 bits: bfloat16 of bfloat16 numbers, else float16.
    """

    tokens_per_scale: ClassVar[int]

    bits: int
    dim: int
    codes_BKTW: Tensor
    scale: Tensor
    zero: Tensor

    @classmethod
    def quantise(cls, x_BKTD: Tensor, bits: int, *, sequences: int = 1) -> Self:
        """Quantise, a block of tokens at a time. `sequences` is as of `blocks`."""
        ranges = blocks(x_BKTD.shape[2], sequences)
        return cls.joined([cls._quantised(x_BKTD[:, :, first:end], bits) for first, end in ranges])

    @classmethod
    @abstractmethod
    def _quantised(cls, x_BKSD: Tensor, bits: int) -> Self: ...

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """The tokens of all parts."""
        if len(parts) == 1:
            return parts[0]
        codes, scale, zero = (
            torch.cat([getattr(part, name) for part in parts], dim=2) for name in ("codes_BKTW", "scale", "zero")
        )
        return replace(parts[0], codes_BKTW=codes, scale=scale, zero=zero)

    @property
    def num_tokens(self) -> int:
        return self.codes_BKTW.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.codes_BKTW.nbytes + self.scale.nbytes + self.zero.nbytes

    def part(self, first: int, end: int) -> Self:
        """The tokens [first, end), as views; whole groups of them."""
        each = self.tokens_per_scale
        assert first % each == end % each == 0, (first, end)
        scale, zero = (x[:, :, first // each : end // each] for x in (self.scale, self.zero))
        return replace(self, codes_BKTW=self.codes_BKTW[:, :, first:end], scale=scale, zero=zero)

    def row(self, row: int) -> Self:
        """The tokens of one row; views."""
        codes, scale, zero = (x[row : row + 1] for x in (self.codes_BKTW, self.scale, self.zero))
        return replace(self, codes_BKTW=codes, scale=scale, zero=zero)

    def pages(self, first: int, end: int) -> Self:
        """The 32 tokens of each page [first, end) of the only head of the only row, as a row of their own; views."""
        part = self.part(first * GROUP, end * GROUP)
        stored = part.codes_BKTW, part.scale, part.zero
        codes, scale, zero = (x.reshape(end - first, 1, -1, x.shape[3]) for x in stored)
        return replace(part, codes_BKTW=codes, scale=scale, zero=zero)

    def in_line(self) -> Self:
        """The tokens of all rows and heads one after another, as those of one head of one row; views if they can be."""
        stored = self.codes_BKTW, self.scale, self.zero
        codes, scale, zero = (x.flatten(0, 2)[None, None] for x in stored)
        return replace(self, codes_BKTW=codes, scale=scale, zero=zero)

    @abstractmethod
    def read(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The numbers (B, K, S, D) of the tokens [start, end)."""

    def _unpacked(self, start: int, end: int, dtype: torch.dtype, width: int) -> Tensor:
        """Codes (B, K, S, width) of the tokens [start, end), as numbers of `dtype`; 0 after the last channel."""
        return unpacked(self.codes_BKTW[:, :, start:end], self.bits, dtype, width)


@dataclass(frozen=True, kw_only=True)
class ChannelGroups(Groups):
    """Groups of 32 tokens of one channel, for keys: a few channels of them are far larger than all others (KIVI).

    The number of tokens is a multiple of 32. `scale` and `zero` are (B, K, T / 32, D).
    """

    tokens_per_scale: ClassVar[int] = GROUP

    @classmethod
    def _quantised(cls, x_BKSD: Tensor, bits: int) -> Self:
        num_tokens, dim = x_BKSD.shape[2:]
        assert num_tokens % GROUP == 0, num_tokens
        x_BKgtD = x_BKSD.unflatten(2, (num_tokens // GROUP, GROUP))
        codes, scale, zero = _encoded(x_BKgtD, bits, dim=3)
        return cls(bits=bits, dim=dim, codes_BKTW=packed(codes.flatten(2, 3), bits), scale=scale, zero=zero)

    def read(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = self._groups(start, end, torch.promote_types(dtype, torch.float32))
        return torch.addcmul(zero.unsqueeze(3), codes, scale.unsqueeze(3)).flatten(2, 3).to(dtype)

    def dot(self, q_BKGD: Tensor, start: int, end: int) -> Tensor:
        """Products (B, K, G, S) of queries, in at least float32, with the tokens [start, end)."""
        codes_BKgtD, scale_BKgD, zero_BKgD = self._groups(start, end, q_BKGD.dtype)
        scaled_BKgGD = q_BKGD.unsqueeze(2) * scale_BKgD.unsqueeze(3)
        zeros_BKgG = (q_BKGD @ zero_BKgD.transpose(2, 3)).transpose(2, 3)
        dots_BKgGt = scaled_BKgGD @ codes_BKgtD.transpose(3, 4) + zeros_BKgG.unsqueeze(4)
        return dots_BKgGt.transpose(2, 3).flatten(3)

    def _groups(self, start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (B, K, g, 32, D), scales and zero points (B, K, g, D) of whole groups."""
        assert start % GROUP == end % GROUP == 0, (start, end)
        width = self.codes_BKTW.shape[3] * (8 // self.bits)
        codes_BKSD = self._unpacked(start, end, dtype, width)[..., : self.dim]
        groups = slice(start // GROUP, end // GROUP)
        codes_BKgtD = codes_BKSD.unflatten(2, ((end - start) // GROUP, GROUP))
        return codes_BKgtD, self.scale[:, :, groups].to(dtype), self.zero[:, :, groups].to(dtype)


@dataclass(frozen=True, kw_only=True)
class TokenGroups(Groups):
    """Groups of 32 channels of one token, the last one smaller; `scale` and `zero` are (B, K, T, F).

    For values, and for keys of which single tokens are dropped later: a token needs no other one.
    """

    tokens_per_scale: ClassVar[int] = 1

    @classmethod
    def _quantised(cls, x_BKSD: Tensor, bits: int) -> Self:
        dim = x_BKSD.shape[3]
        missing = channel_groups(dim) * GROUP - dim
        x_BKSD = torch.cat([x_BKSD, x_BKSD[..., -1:].expand(*x_BKSD.shape[:3], missing)], dim=3)  # in the same range
        codes, scale, zero = _encoded(x_BKSD.unflatten(3, (-1, GROUP)), bits, dim=4)
        return cls(bits=bits, dim=dim, codes_BKTW=packed(codes.flatten(3)[..., :dim], bits), scale=scale, zero=zero)

    def read(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = self._groups(start, end, torch.promote_types(dtype, torch.float32))
        return torch.addcmul(zero.unsqueeze(4), codes, scale.unsqueeze(4)).flatten(3)[..., : self.dim].to(dtype)

    def weighted(self, weights_BKGS: Tensor, start: int, end: int) -> Tensor:
        """Sums (B, K, G, D) of the tokens [start, end) times weights, which are in at least float32."""
        codes_BKSFc, scale_BKSF, zero_BKSF = self._groups(start, end, weights_BKGS.dtype)
        scaled_BKFGS = weights_BKGS.unsqueeze(2) * scale_BKSF.permute(0, 1, 3, 2).unsqueeze(3)
        zeros_BKGF = weights_BKGS @ zero_BKSF
        # Each group's weights times all channels, of which its own count: a product by groups would copy the codes.
        num_groups = scale_BKSF.shape[3]
        sums = scaled_BKFGS.flatten(2, 3) @ codes_BKSFc.flatten(3)
        sums_BKGcF = sums.unflatten(3, (num_groups, GROUP)).unflatten(2, (num_groups, -1)).diagonal(dim1=2, dim2=4)
        return (sums_BKGcF.transpose(3, 4) + zeros_BKGF.unsqueeze(4)).flatten(3)[..., : self.dim]

    def take(self, slots_BKM: Tensor) -> Self:
        """These tokens, by their index, (B, K, M) or (B, 1, M)."""
        slots_BKM1 = slots_BKM.unsqueeze(3)
        codes, scale, zero = (x.take_along_dim(slots_BKM1, dim=2) for x in (self.codes_BKTW, self.scale, self.zero))
        return replace(self, codes_BKTW=codes, scale=scale, zero=zero)

    def _groups(self, start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (B, K, S, F, 32), scales and zero points (B, K, S, F)."""
        codes_BKSFc = self._unpacked(start, end, dtype, channel_groups(self.dim) * GROUP).unflatten(3, (-1, GROUP))
        return codes_BKSFc, self.scale[:, :, start:end].to(dtype), self.zero[:, :, start:end].to(dtype)


def blocks(num_tokens: int, sequences: int = 1) -> Iterator[tuple[int, int]]:
    """Tokens [first, end) of each block, at least one, which may be empty.

    Args:
        sequences: number of heads and rows whose tokens lie one after another, of which a block has as many as a block
            of a dense layer.
    """
    step = BLOCK_TOKENS * sequences
    for first in range(0, max(1, num_tokens), step):
        yield first, min(num_tokens, first + step)


def dtype_of_16_bits(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this dtype are stored in 16 bits: bfloat16 stays, all others are float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in another dtype; those beyond its range become its largest."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _encoded(x: Tensor, bits: int, *, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of numbers whose groups are along `dim`, with scales and zero points, which lack that dim.

    Codes are those that fit the scale and the zero point as they are stored. A group of equal numbers has scale 0.
    """
    stored = dtype_of_16_bits(x.dtype)
    x, most, limit = widened(x), 2**bits - 1, torch.finfo(stored).max
    zero = x.amin(dim, keepdim=True).clamp(-limit, limit).to(stored)
    above_zero = x - zero.to(x.dtype)
    scale = (above_zero.amax(dim, keepdim=True) / most).clamp(0, limit).to(stored)
    step = scale.to(x.dtype)
    codes = (above_zero / step.masked_fill(step == 0, 1)).round_().clamp_(0, most).to(torch.uint8)
    return codes, scale.squeeze(dim), zero.squeeze(dim)


def packed(codes_BKTD: Tensor, bits: int) -> Tensor:
    """Codes in bytes (B, K, T, W)."""
    num_planes, num_bytes = 8 // bits, packed_bytes(codes_BKTD.shape[3], bits)
    planes = pad(codes_BKTD, (0, num_planes * num_bytes - codes_BKTD.shape[3])).split(num_bytes, dim=3)
    packed = planes[0].clone()
    for plane, codes in enumerate(planes[1:], start=1):
        packed |= codes << (plane * bits)
    return packed


def unpacked(packed: Tensor, bits: int, dtype: torch.dtype, width: int) -> Tensor:
    """Codes (..., width) of packed bytes (..., W), as numbers of `dtype`; 0 after the last channel."""
    num_planes, mask, num_bytes = 8 // bits, 2**bits - 1, packed.shape[-1]
    codes = torch.empty(*packed.shape[:-1], width, dtype=dtype, device=packed.device)
    for plane in range(num_planes):
        part = packed >> (plane * bits) if plane else packed
        codes[..., plane * num_bytes : (plane + 1) * num_bytes] = part if plane == num_planes - 1 else part & mask
    codes[..., num_planes * num_bytes :] = 0
    return codes


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of the codes of so many numbers of one token."""
    return -(-dim * bits // 8)


def channel_groups(dim: int) -> int:
    """Number of groups of the channels of one token."""
    return -(-dim // GROUP)
