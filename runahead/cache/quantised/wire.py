"""Keys and values in 8 or 4 bits on their way between ranks: a record of bytes per token and KV head, in any order.

A token's key, or value, of a head is codes with one scale: x = scale * (code - (2^bits - 1) / 2), which is KIVI's form
(`groups.py`) with the range [-max |x|, max |x|], so that no zero point travels. No token needs another one, so any part
of a slab is a message, and a rank passes records on as they are. Numbers that were decoded have the same codes again.

With 4 bits a few large channels of a key would set the step of all others. So keys and values are turned by an
orthogonal matrix before, which spreads them over all channels (QuaRot, Ashkboos et al., NeurIPS 2024, arXiv
2404.00456): a Hadamard matrix, times a cosine transform of what remains of a dim that is no power of 2.
"""

# Legend: S tokens, B batch, K kv heads, D key or value dim, X = both, W bytes of a record.

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from policies.precision import widened
from runahead.cache.quantised.groups import SCALE_BYTES, packed, packed_bytes, unpacked
from runahead.cache.slabs import KVShape

BLOCK_NUMBERS = 1 << 16
"""Numbers that are encoded or decoded at a time, so that they stay in a core's cache."""

SCALE_DTYPE = torch.bfloat16
"""Of any dtype's numbers: it has the range of float32. Its rounding moves the largest code by a quarter at most."""


def sent_shape(shape: KVShape, bits: int | None) -> KVShape:
    """The shape in which keys and values of this shape are sent: of records, bytes that all count as the key.

    Args:
        bits: of a code; None: they are sent as they are.
    """
    if bits is None:
        return shape
    width = record_bytes(shape.key_dim, shape.value_dim, bits)
    return KVShape(
        num_kv_heads=shape.num_kv_heads, key_dim=width, value_dim=0, dtype=torch.uint8, readers=shape.readers
    )


def record_bytes(key_dim: int, value_dim: int, bits: int) -> int:
    """Bytes of a token's record of one head."""
    width = sum(SCALE_BYTES + packed_bytes(dim, bits) for dim in (key_dim, value_dim) if dim)
    return -(-width // SCALE_BYTES) * SCALE_BYTES  # scales are read where they lie


def encode(kv_SBKX: Tensor, key_dim: int, bits: int, records_SBKW: Tensor) -> None:
    """Write the records of keys and values. Not finite numbers make all of their key, or value, not finite."""
    for kv, records in _blocks(kv_SBKX, records_SBKW):
        for x, scale, codes in _parts(kv, key_dim, bits, records):
            x = widened(x)
            if bits < 8:
                x = x @ _turning(x.shape[-1], x.dtype, x.device)
            middle = (2**bits - 1) / 2
            step = (x.abs().amax(dim=-1, keepdim=True) / middle).to(SCALE_DTYPE)
            scale.copy_(step)
            step = step.to(x.dtype)
            numbers = (x / step.masked_fill(step == 0, 1)).add_(middle).round_().clamp_(0, 2 * middle)
            codes.copy_(packed(numbers.to(torch.uint8), bits))


def decode(records_SBKW: Tensor, key_dim: int, bits: int, kv_SBKX: Tensor) -> None:
    """Write the keys and values of records."""
    for kv, records in _blocks(kv_SBKX, records_SBKW):
        for x, scale, codes in _parts(kv, key_dim, bits, records):
            dtype = torch.promote_types(x.dtype, torch.float32)
            numbers = unpacked(codes, bits, dtype, codes.shape[-1] * (8 // bits))[..., : x.shape[-1]]
            numbers = numbers.sub_((2**bits - 1) / 2).mul_(scale)
            if bits < 8:
                numbers = numbers @ _turning(x.shape[-1], dtype, x.device).T
            x.copy_(numbers)


def _blocks(kv_SBKX: Tensor, records_SBKW: Tensor) -> zip[tuple[Tensor, Tensor]]:
    step = max(1, BLOCK_NUMBERS // math.prod(kv_SBKX.shape[1:]))
    return zip(kv_SBKX.split(step), records_SBKW.split(step), strict=True)


def _parts(kv_SBKX: Tensor, key_dim: int, bits: int, records_SBKW: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys, then values, each with where their scales (S, B, K, 1) and codes lie in the records; views."""
    parts = [part for part in kv_SBKX.tensor_split([key_dim], dim=-1) if part.shape[-1]]
    widths = [packed_bytes(part.shape[-1], bits) for part in parts]
    scales, *codes, _ = records_SBKW.split(
        [SCALE_BYTES * len(parts), *widths, records_SBKW.shape[-1] - SCALE_BYTES * len(parts) - sum(widths)], dim=-1
    )
    return list(zip(parts, scales.view(SCALE_DTYPE).split(1, dim=-1), codes, strict=True))


@cache
def _turning(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An orthogonal matrix (D, D) that spreads each channel over all."""
    power = dim & -dim  # the largest power of 2 that divides it
    rest = dim // power
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), hadamard)
    at = torch.arange(rest, dtype=torch.float64)
    cosines = torch.cos(math.pi * (at + 0.5)[:, None] * at / rest) * math.sqrt(2 / rest)
    cosines[:, 0] = 1 / math.sqrt(rest)
    return torch.kron(hadamard / math.sqrt(power), cosines).to(device, dtype)
