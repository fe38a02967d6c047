"""Keys and values in 8, 4 or 2 bits as one record of bytes per token and KV head, for host memory and files.

Records are copied, cut and written like rows of exact numbers. Values have groups of 32 channels of a token. Keys have
groups of 32 tokens of a channel, which are more precise, and the scales and zero points of such a group lie spread over
the records of its tokens. Groups begin at the first row; keys of the rows after the last whole group have groups of
channels, as values do. So a part is read with the rest of its groups: see `whole_groups`.
"""

# Legend: T tokens, K kv heads, X = H + V key and value dims, D one of the two, W bytes, g groups of tokens,
# F groups of channels.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from runahead.cache.quantised.groups import (
    GROUP,
    SCALE_BYTES,
    ChannelGroups,
    TokenGroups,
    channel_groups,
    dtype_of_16_bits,
    packed_bytes,
)
from runahead.cache.slabs import KVShape


class KVRecords:
    """Records of all layers.

    Args:
        shapes: of the layers' exact keys and values.
        bits: of a code.

    Attributes:
        shapes: of the records: bytes, all of which count as the key.
    """

    def __init__(self, shapes: Sequence[KVShape], bits: int) -> None:
        self.bits, self._exact = bits, list(shapes)
        self.shapes = [
            KVShape(num_kv_heads=each.num_kv_heads, key_dim=self._width(each), value_dim=0, dtype=torch.uint8)
            for each in shapes
        ]

    def pack(self, layer: int, kv_TKX: Tensor) -> Tensor:
        """Records (T, K, W) of a layer's tokens, quantised, on their device."""
        key_dim, whole = self._exact[layer].key_dim, len(kv_TKX) // GROUP * GROUP
        kv_1KTX = kv_TKX.transpose(0, 1)[None]
        k_1KTH, v_1KTV = kv_1KTX[..., :key_dim], kv_1KTX[..., key_dim:]
        keys = [self._by_channel(k_1KTH[:, :, :whole]), self._by_token(k_1KTH[:, :, whole:])]
        return torch.cat([torch.cat(keys, dim=2), self._by_token(v_1KTV)], dim=3)[0].transpose(0, 1)

    def unpack(self, layer: int, records_TKW: Tensor) -> Tensor:
        """Keys and values (T, K, H + V) of records, from the first of a group on."""
        shape, whole = self._exact[layer], len(records_TKW) // GROUP * GROUP
        records_1KTW = records_TKW.transpose(0, 1)[None]
        k_1KTW, v_1KTW = records_1KTW.tensor_split([self._bytes(shape.key_dim)], dim=3)
        of_groups = self._of_channels(k_1KTW[:, :, :whole], shape.key_dim, shape.dtype)
        keys = [of_groups, self._of_tokens(k_1KTW[:, :, whole:], shape.key_dim, shape.dtype)]
        values = self._of_tokens(v_1KTW, shape.value_dim, shape.dtype)
        return torch.cat([torch.cat(keys, dim=2), values], dim=3)[0].transpose(0, 1)

    def _width(self, shape: KVShape) -> int:
        return self._bytes(shape.key_dim) + self._bytes(shape.value_dim)

    def _bytes(self, dim: int) -> int:
        return packed_bytes(dim, self.bits) + 2 * SCALE_BYTES * channel_groups(dim)

    def _by_token(self, x_1KTD: Tensor) -> Tensor:
        groups = TokenGroups.quantise(x_1KTD, self.bits)
        return torch.cat([groups.codes_BKTW, groups.scale.view(torch.uint8), groups.zero.view(torch.uint8)], dim=3)

    def _by_channel(self, x_1KTD: Tensor) -> Tensor:
        groups, dim = ChannelGroups.quantise(x_1KTD, self.bits), x_1KTD.shape[3]
        scales_1KgW = torch.cat([groups.scale, groups.zero], dim=3).view(torch.uint8)
        token_bytes = 2 * SCALE_BYTES * channel_groups(dim)
        scales_1KgW = pad(scales_1KgW, (0, GROUP * token_bytes - scales_1KgW.shape[3]))
        return torch.cat([groups.codes_BKTW, scales_1KgW.unflatten(3, (GROUP, token_bytes)).flatten(2, 3)], dim=3)

    def _of_tokens(self, records_1KTW: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if not records_1KTW.numel():
            return records_1KTW.new_empty(*records_1KTW.shape[:3], dim, dtype=dtype)
        codes, scales = records_1KTW.tensor_split([packed_bytes(dim, self.bits)], dim=3)
        scale, zero = _copied(scales).view(dtype_of_16_bits(dtype)).chunk(2, dim=3)
        groups = TokenGroups(bits=self.bits, dim=dim, codes_BKTW=codes, scale=scale, zero=zero)
        return groups.read(0, codes.shape[2], dtype)

    def _of_channels(self, records_1KTW: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if not records_1KTW.numel():
            return records_1KTW.new_empty(*records_1KTW.shape[:3], dim, dtype=dtype)
        codes, scales_1KTW = records_1KTW.tensor_split([packed_bytes(dim, self.bits)], dim=3)
        scales_1KgW = scales_1KTW.unflatten(2, (-1, GROUP)).flatten(3)[..., : 2 * SCALE_BYTES * dim]
        scale, zero = _copied(scales_1KgW).view(dtype_of_16_bits(dtype)).chunk(2, dim=3)
        groups = ChannelGroups(bits=self.bits, dim=dim, codes_BKTW=codes, scale=scale, zero=zero)
        return groups.read(0, codes.shape[2], dtype)


def whole_groups(start: int, stop: int, num_tokens: int) -> tuple[int, int]:
    """Rows with which the rows [start, stop) of `num_tokens` are read: those of the same groups, too."""
    return start // GROUP * GROUP, min(-(-stop // GROUP) * GROUP, num_tokens)


def _copied(scales: Tensor) -> Tensor:
    """A copy, since a view of 16-bit numbers begins at an even byte."""
    return scales.clone(memory_format=torch.contiguous_format)
