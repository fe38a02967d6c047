"""Codes of a layer from which single tokens are fetched: in host memory if the device is a GPU.

The codes of a token's key and value lie side by side, with the scales of the value's groups, so a token is one run of
32-bit words. These words are slots of a layer as any other, which copies, fetches and grows them. Scales of keys serve
32 tokens each and stay on the device, and so do the newest tokens, which are not quantised. Tokens are dequantised
where they arrive.
"""

# Legend: B batch, K kv heads, n stored slots, m fetched ones, S new ones, G groups of 32 tokens, H key dim,
# V value dim, X = H + V, F groups of a value's channels, W bytes of its codes, Y words of a token, x fetched slots of
# some rows and KV heads, one after another.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.row_values import row_values
from runahead.cache.host.copy_stream import CopyStream
from runahead.cache.host.layer import HostLayer
from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.groups import (
    GROUP,
    ChannelGroups,
    TokenGroups,
    channel_groups,
    dtype_of_16_bits,
    packed_bytes,
    unpacked,
)
from runahead.cache.quantised.rows import Codes, QuantisedRows
from runahead.cache.slabs import KVShape, KVSlab, SlotsToCopy

WORD = torch.int32


@dataclass(kw_only=True)
class PooledCodes(Codes):
    """Codes in slots of a layer, whose keys are grouped by channel.

    Attributes:
        pads: slots on the left of each row that are padding.
        words: key and value of each quantised slot as words; slots from a row's `end` on are unwritten.
        scales: scale, as a key, and zero point, as a value, of each group of keys, by its number in its row.
    """

    pads: list[int]
    words: KeptLayer
    scales: KeptLayer

    @property
    def is_pool(self) -> bool:
        return True

    @property
    def on_host(self) -> bool:
        return self.words.on_host

    @property
    def pool_bytes(self) -> int:
        return self.words.pool_bytes

    @property
    def num_bytes(self) -> int:
        return self.words.pool_bytes + self.scales.pool_bytes

    def fetched_bytes(self, num_slots: int) -> int:
        return self.words.fetched_bytes(num_slots, room=0)

    def to_host(self, copies: CopyStream, *, room: int, spare: int) -> PooledCodes:
        """The same codes with their words in host memory; see `HostLayer.copied_from`. `room` and `spare` are words."""
        return self._over(HostLayer.copied_from(self.words, copies, room=room, spare=spare), self.scales)

    def to_device(self) -> PooledCodes:
        return self._over(self.words.to_device(), self.scales) if self.on_host else self

    def fork(self, *, copy: bool) -> PooledCodes:
        # Rows whose quantised tokens end in different slots go on in memory that the others share.
        copy = copy or len(self.parts) > 1
        return self._over(self.words.fork(copy=copy), self.scales.fork(copy=copy))

    def gather(self, wanted: SlotsToCopy, *, window: KVSlab, num_slots: int) -> Callable[[], Tensor] | None:
        """As of `Codes`: words are copied, and what the function returns is in the layer's dtype."""
        batch, num_heads, start = len(self.pads), self.shape.num_kv_heads, window.first
        by_slot, exact_TBKX = batch * num_heads, window.tokens(start, num_slots)
        rows_X, skips_keys = wanted.rows_X, wanted.skips_keys
        if rows_X is None:
            if not self.on_host:
                return None
            rows_X = torch.arange(num_slots * by_slot, device=exact_TBKX.device)
        slots_x, places_x = rows_X // by_slot, rows_X % by_slot
        pads_x, ends_x = (_by_row(values, places_x // num_heads) for values in zip(*self._ranges(), strict=True))
        is_exact_x1 = (slots_x >= ends_x).unsqueeze(1)
        first = self.shape.key_dim if skips_keys else 0
        exact_x = (slots_x - start).clamp_min(0) * by_slot + places_x
        slot_heads = wanted.heads or (batch, num_heads)
        bring: Callable[[], Tensor] | None = None
        if self.words.num_slots:
            groups_x = ((slots_x - pads_x).clamp(0, self.scales.num_slots * GROUP - 1) // GROUP) * by_slot + places_x
            scales_x = self.scales.slab_TBKX.flatten(0, 2).index_select(0, groups_x)
            stored_x = rows_X.clamp_max(self.words.num_slots * by_slot - 1)
            bring = self.words.gather(replace(wanted, rows_X=stored_x, room=0, heads=slot_heads))

        def gathered() -> Tensor:
            num_fetched = len(slots_x) // (slot_heads[0] * slot_heads[1])
            width, last = exact_TBKX.shape[3], len(exact_TBKX) * by_slot - 1
            slab_mBKX = exact_TBKX.new_empty(num_fetched + wanted.room, *slot_heads, width, dtype=self.shape.dtype)
            out_xX = slab_mBKX[:num_fetched].view(-1, width)[:, first:]
            out_xX.copy_(exact_TBKX.flatten(0, 2)[:, first:].index_select(0, exact_x.clamp_max(last)))
            if bring is not None:
                numbers_xX = self._dequantised(bring().flatten(0, 2), scales_x, skips_keys=skips_keys)
                out_xX.copy_(torch.where(is_exact_x1, out_xX, numbers_xX))
            return slab_mBKX

        return gathered

    def _dequantised(self, words_xY: Tensor, scales_xH: Tensor, *, skips_keys: bool) -> Tensor:
        """Keys and values of fetched words, or values alone, as `Groups.read` computes them."""
        dtype = self.shape.dtype
        codes_xW, values = self._split(words_xY[None, None])
        v_xV = values.read(0, values.num_tokens, dtype)[0, 0]
        if skips_keys:
            return v_xV
        wide = torch.promote_types(dtype, torch.float32)
        codes_xH = unpacked(codes_xW[0, 0], self.few.bits, wide, self.shape.key_dim)
        scale_xH, zero_xH = scales_xH.to(wide).split(self.shape.key_dim, dim=1)
        return torch.cat([torch.addcmul(zero_xH, codes_xH, scale_xH).to(dtype), v_xV], dim=1)

    def _split(self, words_BKnY: Tensor) -> tuple[Tensor, TokenGroups]:
        """Packed codes (B, K, n, W) of keys, and the values, as views of words."""
        key_dim, value_dim = self.shape.key_dim, self.shape.value_dim
        num_groups, num_key_words = channel_groups(value_dim), self.words.shape.key_dim
        scales_BKnF = words_BKnY[..., num_key_words : num_key_words + num_groups]
        scale, zero = scales_BKnF.view(self.scales.shape.dtype).split(num_groups, dim=3)
        k_BKnW = words_BKnY[..., :num_key_words].view(torch.uint8)[..., : packed_bytes(key_dim, self.few.bits)]
        v_BKnW = words_BKnY[..., num_key_words + num_groups :].view(torch.uint8)
        v_BKnW = v_BKnW[..., : packed_bytes(value_dim, self.few.bits)]
        return k_BKnW, TokenGroups(bits=self.few.bits, dim=value_dim, codes_BKTW=v_BKnW, scale=scale, zero=zero)

    def _add(self, place: int, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        part = self.parts[place]
        keys, values = ChannelGroups.quantise(k_BKSH, self.few.bits), TokenGroups.quantise(v_BKSV, self.few.bits)
        self._put_words(replace(part, keys=keys, values=values), first=part.end)
        self.parts = self._over(self.words, self.scales).parts  # memory may have moved
        self.parts[place] = self._viewed(part, part.num_tokens + values.num_tokens)

    def _put_words(self, new: QuantisedRows, *, first: int) -> None:
        """Store tokens of some rows in the slots from `first` on."""
        assert isinstance(new.keys, ChannelGroups), "single tokens are fetched of keys that are grouped by channel"
        scales = torch.cat([new.values.scale, new.values.zero], dim=3).view(WORD)
        words_BKSY = torch.cat([_as_words(new.keys.codes_BKTW), scales, _as_words(new.values.codes_BKTW)], dim=3)
        self.words.put(first, new.rows, words_BKSY.permute(2, 0, 1, 3))
        scales_BKGX = torch.cat([new.keys.scale, new.keys.zero], dim=3)
        self.scales.put((first - new.pad) // GROUP, new.rows, scales_BKGX.permute(2, 0, 1, 3))

    def _over(self, words: KeptLayer, scales: KeptLayer) -> PooledCodes:
        """The same codes over other memory with the same content."""
        other = replace(self, words=words, scales=scales)
        other.parts = [other._viewed(part, part.num_tokens) for part in self.parts]
        return other

    def _viewed(self, part: QuantisedRows, num_tokens: int) -> QuantisedRows:
        """The first quantised tokens of some rows, as views."""
        rows, slots = part.rows, slice(part.pad, part.pad + num_tokens)
        codes, values = self._split(self.words.mapped_TBKX()[slots, rows].permute(1, 2, 0, 3))
        scales_BKGX = self.scales.slab_TBKX[: num_tokens // GROUP, rows].permute(1, 2, 0, 3)
        scale, zero = scales_BKGX.split(self.shape.key_dim, dim=3)
        keys = ChannelGroups(bits=self.few.bits, dim=self.shape.key_dim, codes_BKTW=codes, scale=scale, zero=zero)
        return replace(part, keys=keys, values=values)

    def _ranges(self) -> list[tuple[int, int]]:
        """Padding and end of the quantised tokens of each row."""
        by_row = {row: part for part in self.parts for row in range(len(self.pads))[part.rows]}
        return [(by_row[row].pad, by_row[row].end) for row in range(len(self.pads))]


def pooled(layer: KeptLayer, *, room: int) -> KeptLayer:
    """A layer in few bits from whose codes single tokens can be fetched, with room for those of `room` more tokens."""
    codes = layer.codes
    assert codes is not None, "layers whose heads keep different numbers of tokens are not retrieved from"
    if codes.is_pool:
        return layer
    num_slots = codes.end_after(layer.num_slots + room)
    made = PooledCodes(
        shape=layer.shape,
        few=codes.few,
        parts=codes.parts,
        pads=layer.pads,
        words=_memory(layer, word_shape(layer.shape, codes.few.bits), num_slots),
        scales=_memory(layer, scale_shape(layer.shape), -(-num_slots // GROUP)),
    )
    for part in codes.parts:
        if part.num_tokens:
            made._put_words(part, first=part.pad)
    return layer.over(made._over(made.words, made.scales))


def to_host(layer: KeptLayer, copies: CopyStream, *, room: int, spare: int) -> KeptLayer:
    """A layer in host memory, or with its codes there if older tokens are in few bits; see `HostLayer.copied_from`."""
    codes = layer.codes
    if codes is None:
        return HostLayer.copied_from(layer, copies, room=room, spare=spare)
    assert isinstance(codes, PooledCodes), "codes become a pool first"
    used = codes.words.num_slots
    room, spare = (max(0, codes.end_after(layer.num_slots + num) - used) for num in (room, spare))
    return layer.over(codes.to_host(copies, room=room, spare=spare))


def word_shape(shape: KVShape, bits: int) -> KVShape:
    """Words of a token's key, and of its value with the scales of its groups."""
    key_words, value_words = (-(-packed_bytes(dim, bits) // WORD.itemsize) for dim in (shape.key_dim, shape.value_dim))
    value_words += channel_groups(shape.value_dim)
    return KVShape(num_kv_heads=shape.num_kv_heads, key_dim=key_words, value_dim=value_words, dtype=WORD)


def scale_shape(shape: KVShape) -> KVShape:
    """Scale and zero point of each channel of a group of keys."""
    return replace(shape, value_dim=shape.key_dim, dtype=dtype_of_16_bits(shape.dtype), readers=())


def _memory(layer: KeptLayer, shape: KVShape, room: int) -> KeptLayer:
    """Empty slots of another shape for the rows of a layer; 0 in padding, which is fetched, too."""
    batch, device = len(layer.pads), layer.slab_TBKX.device
    made = KeptLayer.empty(shape, batch=batch, room=0, device=device)
    made.slab_TBKX = made.slab_TBKX.new_zeros(room, *made.slab_TBKX.shape[1:])
    return made


def _as_words(codes_BKSW: Tensor) -> Tensor:
    return pad(codes_BKSW, (0, -codes_BKSW.shape[3] % WORD.itemsize)).contiguous().view(WORD)


def _by_row(values: Sequence[int], rows_x: Tensor) -> Tensor | int:
    """The value of each of these rows."""
    return values[0] if len(set(values)) == 1 else row_values(values, rows_x.device)[rows_x]
