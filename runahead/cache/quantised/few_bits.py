"""A layer's older tokens are in 8, 4 or 2 bits, and its newest ones, the window, exact or in 16 bits (KIVI)."""

# Legend: T slots, B batch, K kv heads, S tokens, X = key + value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.groups import GROUP, ChannelGroups, TokenGroups, dtype_of_16_bits
from runahead.cache.slabs import KVShape, KVSlab


@dataclass(frozen=True, kw_only=True)
class FewBits:
    """Precision of a layer's older tokens. Tokens leave the window of the newest ones in whole groups of 32.

    Attributes:
        bits: of a code.
        residual: a row or head has at least so many tokens in the window, if it has so many and none is dropped later.
        residual_bits: 16, or None for the layer's dtype: of the numbers in the window.
        keys_by_token: keys are grouped by token rather than by channel, as single tokens are dropped later.
        becomes_ragged: whether cutting a layer back makes it ragged, however many tokens each head keeps. Heads of
            other rows may differ, and which tokens are quantised then does not depend on these.
    """

    bits: int
    residual: int
    residual_bits: int | None
    keys_by_token: bool
    becomes_ragged: bool = False

    def window_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the newest tokens of a layer of this dtype."""
        return dtype if self.residual_bits is None else dtype_of_16_bits(dtype)

    def leaving(self, num_exact: int) -> int:
        """Number of tokens that leave a window of `num_exact`: whole groups."""
        return max(0, num_exact - self.residual) // GROUP * GROUP

    def code_bytes(self, shape: KVShape, num_tokens: int) -> int:
        """Bytes of the quantised tokens of one KV head of one row."""
        keys: type[ChannelGroups | TokenGroups] = TokenGroups if self.keys_by_token else ChannelGroups
        scales = ChannelScales.bytes_of(shape.key_dim) if self.keys_by_token else 0
        values = TokenGroups.bytes_of(num_tokens, shape.value_dim, self.bits)
        return keys.bytes_of(num_tokens, shape.key_dim, self.bits) + scales + values


@dataclass(frozen=True, kw_only=True)
class Window(KVSlab):
    """Slots that are read in another dtype than they are stored in."""

    dtype: torch.dtype

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_BKSH, v_BKSV = super().read(start, end)
        return k_BKSH.to(self.dtype), v_BKSV.to(self.dtype)


def quantised_bytes(
    shapes: Sequence[KVShape],
    num_tokens: int,
    *,
    bits: int,
    residual: int,
    residual_bits: int | None,
    batch: int = 1,
    room: int = 0,
    keys_by_token: bool = False,
) -> int:
    """Bytes of a cache of prompts of `num_tokens` tokens: codes, scales, the window with its room, and positions."""
    few = FewBits(bits=bits, residual=residual, residual_bits=residual_bits, keys_by_token=keys_by_token)
    num_quantised, total = few.leaving(num_tokens), 0
    for shape in shapes:
        total += batch * shape.num_kv_heads * few.code_bytes(shape, num_quantised)
        window = replace(shape, dtype=few.window_dtype(shape.dtype))
        total += (num_tokens - num_quantised + room) * window.bytes_per_token(batch)
        total += (num_tokens + room) * batch * torch.int32.itemsize
    return total


def ragged_bytes(
    shape: KVShape,
    lengths: Sequence[int],
    *,
    bits: int,
    residual: int,
    residual_bits: int | None,
    room: int = 0,
    keys_by_token: bool = False,
    compensates: bool = False,
) -> int:
    """Bytes of a layer whose rows and KV heads keep so many tokens of a prompt, row by row, in each head by head.

    They are those of codes and scales, the windows with their room, positions, and of where the sequences are; with
    `compensates` those of the sums of dropped tokens, too.
    """
    few = FewBits(bits=bits, residual=residual, residual_bits=residual_bits, keys_by_token=keys_by_token)
    exact = (shape.key_dim + shape.value_dim) * few.window_dtype(shape.dtype).itemsize
    total = torch.int32.itemsize * (3 * len(lengths) + 2) + torch.int64.itemsize * len(lengths)
    if compensates:
        wide = torch.promote_types(shape.dtype, torch.float32).itemsize
        total += len(lengths) * (shape.key_dim + shape.value_dim + 1) * wide
    for length in lengths:
        num_coded = few.leaving(length)
        total += few.code_bytes(shape, num_coded)
        total += (length - num_coded + room) * exact + (length + room) * torch.int32.itemsize
    return total
