"""Bytes of layers in few bits as their format says, which the stores' own counts have to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import (
    GROUP,
    SCALE_BYTES,
    ChannelGroups,
    Groups,
    TokenGroups,
    channel_groups,
    packed_bytes,
)
from runahead.cache.quantised.pool import scale_shape, word_shape
from runahead.cache.slabs import KVShape


def group_bytes(kind: type[Groups], num_tokens: int, dim: int, bits: int) -> int:
    """Bytes of codes, scales and zero points of so many tokens of one head of one row."""
    num_scales = num_tokens // GROUP * dim if kind is ChannelGroups else num_tokens * channel_groups(dim)
    return num_tokens * packed_bytes(dim, bits) + num_scales * 2 * SCALE_BYTES


def channel_scale_bytes(dim: int) -> int:
    """Bytes of the middles and scales of the channels of one head of one row."""
    return 2 * SCALE_BYTES * dim


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
        total += batch * shape.num_kv_heads * _code_bytes(few, shape, num_quantised)
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

    They are those of codes and scales, the windows with their room, positions, and of where the sequences and the pages
    of their keys are; with `compensates` those of the sums of dropped tokens, too.
    """
    few = FewBits(bits=bits, residual=residual, residual_bits=residual_bits, keys_by_token=keys_by_token)
    exact = (shape.key_dim + shape.value_dim) * few.window_dtype(shape.dtype).itemsize
    num_places = 2 * len(lengths) + 1 + (0 if keys_by_token else len(lengths) + 1)
    total = torch.int32.itemsize * num_places + torch.int64.itemsize * len(lengths)
    if compensates:
        wide = torch.promote_types(shape.dtype, torch.float32).itemsize
        total += len(lengths) * (shape.key_dim + shape.value_dim + 1) * wide
    for length in lengths:
        num_coded = few.leaving(length)
        total += _code_bytes(few, shape, num_coded)
        total += (length - num_coded + room) * exact + (length + room) * torch.int32.itemsize
    return total


def pooled_bytes(
    shapes: Sequence[KVShape], num_tokens: int, *, bits: int, residual: int, residual_bits: int | None, batch: int = 1
) -> tuple[int, int]:
    """Bytes of a cache of prompts of `num_tokens` tokens that has no room: those that are fetched from, and all others.

    The others are on the device: the window of the newest tokens, the scales of keys, and positions.
    """
    num_quantised = max(0, (num_tokens - residual) // GROUP * GROUP)
    in_window = num_tokens - num_quantised
    window = quantised_bytes(shapes, in_window, bits=bits, residual=in_window, residual_bits=residual_bits, batch=batch)
    positions = len(shapes) * num_quantised * batch * torch.int32.itemsize
    scales = sum(num_quantised // GROUP * scale_shape(shape).bytes_per_token(batch) for shape in shapes)
    return (
        sum(num_quantised * word_shape(shape, bits).bytes_per_token(batch) for shape in shapes),
        window + positions + scales,
    )


def _code_bytes(few: FewBits, shape: KVShape, num_tokens: int) -> int:
    """Bytes of the quantised tokens of one KV head of one row."""
    kind: type[Groups] = TokenGroups if few.keys_by_token else ChannelGroups
    scales = channel_scale_bytes(shape.key_dim) if few.keys_by_token else 0
    values = group_bytes(TokenGroups, num_tokens, shape.value_dim, few.bits)
    return group_bytes(kind, num_tokens, shape.key_dim, few.bits) + scales + values
