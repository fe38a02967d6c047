"""The older tokens of rows of equal KV heads, in few bits.

Tokens leave the window of the newest ones in whole groups of 32. Groups begin at a row's first token, so a row of a
padded batch has the same groups as alone. Generated and given tokens attend to blocks of the quantised tokens and to
the window, so that no more than a block is dequantised at a time. A whole layer is where a policy looks at all keys,
where positions are re-encoded, and where a layer has a window and its tokens have gaps or other ranks have some.
"""

# Legend: n stored slots, m kept ones, B batch, N query heads, K kv heads, G query heads per KV head, C new tokens,
# S quantised tokens, H key dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from runahead.attention.op import EVERY_ROW, Codec, Part, Run, Span, rows_by_pad, spans_of
from runahead.attention.partial import AttentionTerms, KeyBias, attend, merge
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import ChannelGroups, Groups, TokenGroups, blocks
from runahead.cache.slabs import KVShape, KVSlab, SlotsToCopy, taken

Bias: TypeAlias = Callable[[KeyBias, slice | Tensor, slice], Tensor]


@dataclass(frozen=True, kw_only=True)
class QuantisedRows(Codec):
    """The quantised tokens of rows with the same padding, the first ones of each row.

    Attributes:
        rows: all rows of the batch, or one.
        pad: their slots of padding.
        scales: of the keys' channels if keys are grouped by token.
    """

    rows: slice
    pad: int
    keys: Groups
    values: TokenGroups
    scales: ChannelScales | None = None

    @classmethod
    def empty(
        cls, k_BK0H: Tensor, v_BK0V: Tensor, bits: int, *, rows: slice, pad: int, by_token: bool
    ) -> QuantisedRows:
        """Rows without quantised tokens."""
        scales = ChannelScales.from_keys(k_BK0H) if by_token else None
        keys = ChannelGroups.quantise(k_BK0H, bits) if scales is None else scales.groups(k_BK0H, bits)
        return cls(rows=rows, pad=pad, keys=keys, values=TokenGroups.quantise(v_BK0V, bits), scales=scales)

    @property
    def num_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.num_bytes
        return self.keys.num_bytes + self.values.num_bytes + scales

    @property
    def num_tokens(self) -> int:
        return self.values.num_tokens

    @property
    def end(self) -> int:
        """Number of the slot after the last quantised one."""
        return self.pad + self.num_tokens

    def grown(self, k_BKSH: Tensor, v_BKSV: Tensor) -> QuantisedRows:
        """With more tokens, which come after the others."""
        bits, scales = self.values.bits, self.scales
        if scales is not None and not self.num_tokens:
            scales = ChannelScales.from_keys(k_BKSH)
        new = ChannelGroups.quantise(k_BKSH, bits) if scales is None else scales.groups(k_BKSH, bits)
        values = TokenGroups.joined([self.values, TokenGroups.quantise(v_BKSV, bits)])
        return replace(self, keys=Groups.joined([self.keys, new]), values=values, scales=scales)

    def row(self, row: int) -> QuantisedRows:
        """The tokens of one row of the batch, without its padding."""
        place = row - (self.rows.start or 0)
        scales = None if self.scales is None else self.scales.row(place)
        keys, values = self.keys.row(place), self.values.row(place)
        return replace(self, rows=EVERY_ROW, pad=0, keys=keys, values=values, scales=scales)

    def taken(self, chosen_BKm: Tensor) -> QuantisedRows:
        """These tokens of each head alone, by their numbers; the codes stay as they are."""
        assert isinstance(self.keys, TokenGroups), "a group of several tokens cannot lose one of them"
        return replace(self, keys=self.keys.take(chosen_BKm), values=self.values.take(chosen_BKm))

    def read_keys(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The keys (B, K, S, H) of the tokens [start, end)."""
        if self.scales is None:
            return self.keys.read(start, end, dtype)
        assert isinstance(self.keys, TokenGroups)
        return self.scales.read(self.keys, start, end, dtype)

    @property
    def value_dim(self) -> int:
        return self.values.dim

    def attend(
        self, q_BNCH: Tensor, start: int, end: int, terms: AttentionTerms, *, q_start: int, k_start: int
    ) -> Part:
        first, sees_all = start - self.pad, terms.sees_all
        assert end == self.end, "queries see all quantised tokens from the first one that they see"
        if q_BNCH.shape[2] == 1 and sees_all and not terms.needs_scores and isinstance(self.keys, ChannelGroups):
            return self.attend_one(q_BNCH, terms.scaling)
        found: Part | None = None
        for begin, stop in blocks(self.num_tokens):  # each is dequantised for it
            if stop > first or not stop:  # of no tokens 0 and -inf
                k, v = self.read_keys(begin, stop, q_BNCH.dtype), self.values.read(begin, stop, q_BNCH.dtype)
                unseen = max(0, first - begin)
                k, v = k[:, :, unseen:], v[:, :, unseen:]
                part = attend(q_BNCH, k, v, terms, q_start=q_start, k_start=begin + unseen)
                found = part if found is None else merge(*found, *part)
        assert found is not None, (start, end)
        return found

    def attend_one(self, q_BN1H: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention of one query per row to all tokens: output (B, N, 1, V), log-sum-exp (B, N, 1).

        Codes are multiplied as they are. The keys are grouped by channel.
        """
        assert isinstance(self.keys, ChannelGroups)
        wide = torch.promote_types(q_BN1H.dtype, torch.float32)
        num_kv_heads, ranges = self.keys.codes_BKTW.shape[1], list(blocks(self.num_tokens))
        q_BKGH = q_BN1H[:, :, 0].to(wide).unflatten(1, (num_kv_heads, -1)) * scaling
        scores = [self.keys.dot(q_BKGH, first, end) for first, end in ranges]
        scores_BKGS = scores[0] if len(scores) == 1 else torch.cat(scores, dim=3)
        lse_BKG = torch.logsumexp(scores_BKGS, dim=3)
        weights_BKGS = torch.exp(scores_BKGS - lse_BKG.unsqueeze(3))
        out_BKGV = reduce(
            torch.add, (self.values.weighted(weights_BKGS[..., first:end], first, end) for first, end in ranges)
        )
        return out_BKGV.flatten(1, 2).unsqueeze(2), lse_BKG.flatten(1, 2).unsqueeze(2)


@dataclass(kw_only=True)
class Codes:
    """The quantised tokens of a layer whose heads store equally many, in memory of their own.

    A copy of the layer for a fork has the same codes, since these are never changed in place.

    Attributes:
        shape: of the layer.
        few: precision of the codes and of the window.
        parts: the quantised tokens of all rows, by their padding.
    """

    shape: KVShape
    few: FewBits
    parts: list[QuantisedRows]

    @classmethod
    def empty(cls, shape: KVShape, few: FewBits, nothing: tuple[Tensor, Tensor], pads: Sequence[int]) -> Codes:
        """No quantised tokens. `nothing` are keys (B, K, 0, H) and values (B, K, 0, V)."""
        k_BK0H, v_BK0V = nothing
        parts = [
            QuantisedRows.empty(k_BK0H[rows], v_BK0V[rows], few.bits, rows=rows, pad=pad, by_token=few.keys_by_token)
            for rows, pad in rows_by_pad(pads)
        ]
        return cls(shape=shape, few=few, parts=parts)

    @property
    def is_pool(self) -> bool:
        """Whether single tokens are fetched from the codes."""
        return False

    @property
    def on_host(self) -> bool:
        """Whether the codes are in host memory while another device computes."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def pool_bytes(self) -> int:
        """Bytes of what a retrieving policy fetches from."""
        return self.num_bytes

    def fetched_bytes(self, num_slots: int) -> int:
        """Bytes on the device of codes that `gather` copies of so many slots."""
        return 0

    def gather(self, wanted: SlotsToCopy, *, window: KVSlab, num_slots: int) -> Callable[[], Tensor] | None:
        """Copy some slots to the device, dequantised; see `KeptLayer.gather`.

        Args:
            window: the newest ones of `num_slots` slots.
        """
        assert wanted.rows_X is None, "single tokens are fetched of a pool"
        return None

    @property
    def first_exact(self) -> int:
        """The first slot that is in the window of any row."""
        return min(part.end for part in self.parts)

    def end_after(self, num_slots: int) -> int:
        """The first slot that is in the window of all rows, once there are so many slots."""
        return max(part.end + self.few.leaving(num_slots - part.end) for part in self.parts)

    def to_device(self) -> Codes:
        """The same codes in device memory."""
        return self

    def fork(self, *, copy: bool) -> Codes:
        return replace(self, parts=list(self.parts))

    def row(self, row: int) -> Codes:
        """The codes of one row of the batch."""
        [part] = [part for part in self.parts if part.rows.start in (None, row)]
        return replace(self, parts=[part.row(row)])

    def grow(self, window: KVSlab, num_slots: int) -> None:
        """Quantise the tokens that leave the window of a row with so many slots."""
        for place, part in enumerate(self.parts):
            num = self.few.leaving(num_slots - part.end)
            if num:
                self._add(place, *self._exact(window, part, part.end, part.end + num))

    def _add(self, place: int, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        """Quantise tokens that come after all others of a part."""
        self.parts[place] = self.parts[place].grown(k_BKSH, v_BKSV)

    def runs(self, num_new: int, tokens: NewTokens, end: int, bias: Bias) -> tuple[list[Span], list[Run]]:
        """Spans of the tokens in the window of `end` slots, and runs of the quantised ones, as the new tokens see them.

        These are the newest ones, or are stored by another rank. `bias` is as of `Run`.
        """
        has_new = tokens.part is None or tokens.part.owns(tokens.start)
        places = tuple((part.pad, part.end) for part in self.parts)
        exact, coded = tokens.once((Codes, num_new, end, places), lambda: self._spans(num_new, end, has_new=has_new))
        return exact, [Run(part, [span], bias) for part, span in zip(self.parts, coded, strict=True) if part.num_tokens]

    def _spans(self, num_new: int, end: int, *, has_new: bool) -> tuple[list[Span], list[Span]]:
        exact, coded = list[Span](), list[Span]()
        start = end - num_new if has_new else end
        for part in self.parts:
            window, before = range(part.end, end), range(part.pad, part.end)
            [span] = spans_of(window, start=start, num_new=num_new, pads=[part.pad], has_new=has_new)
            exact.append(replace(span, rows=part.rows, stored=part.rows))
            coded.append(replace(exact[-1], stored=EVERY_ROW, slots=before, at=before, has_new=False))
        return exact, coded

    def read(self, window: KVSlab, num_slots: int) -> KVSlab:
        """All slots, dequantised, in new memory; padding is 0."""
        key_dim, dtype = self.shape.key_dim, self.shape.dtype
        slab_TBKX = window.slab_TBKX.new_zeros(num_slots, *window.slab_TBKX.shape[1:], dtype=dtype)
        for part in self.parts:
            for first, end in blocks(part.num_tokens):
                slots_SBKX = slab_TBKX[part.pad + first : part.pad + end, part.rows]
                slots_SBKX[..., :key_dim] = part.read_keys(first, end, dtype).permute(2, 0, 1, 3)
                slots_SBKX[..., key_dim:] = part.values.read(first, end, dtype).permute(2, 0, 1, 3)
            slab_TBKX[part.end :, part.rows] = window.tokens(part.end, num_slots)[:, part.rows]
        return KVSlab(slab_TBKX=slab_TBKX, key_dim=key_dim, first=0)

    def kept(
        self, slots_mBK: Tensor, kept_pads: Sequence[int], *, window: KVSlab, num_slots: int, room: int
    ) -> tuple[Codes, Tensor]:
        """Some slots of a layer whose keys are grouped by token, and their window with room for `room` more.

        No kept slot is quantised a second time, and none is dequantised. So the number of quantised ones stays, if so
        many slots are kept: a head that drops some of them has the oldest ones of its window quantised.
        """
        num_kept, kept = len(slots_mBK), list[QuantisedRows]()
        windows: list[Tensor] = []
        for part in self.parts:
            pad = kept_pads[part.rows.start or 0]
            slots_BKm = slots_mBK[pad:, part.rows].permute(1, 2, 0)
            num_quantised = min(part.num_tokens, num_kept - pad)
            if num_quantised:
                num_dropped = num_slots - part.pad - (num_kept - pad)
                leaving = self._exact(window, part, part.end, min(num_slots, part.end + num_dropped))
                part = part.grown(*leaving).taken(slots_BKm[..., :num_quantised] - part.pad)
            kept.append(replace(part, pad=pad))
            windows.append(slots_BKm[..., num_quantised:].permute(2, 0, 1) - window.first)
        start = min(part.end for part in kept)
        old_TBKX = window.slab_TBKX
        slab_TBKX = old_TBKX.new_empty(num_kept - start + room, *old_TBKX.shape[1:])
        for part, window_SBK in zip(kept, windows, strict=True):
            slots = slice(part.end - start, num_kept - start)
            slab_TBKX[slots, part.rows] = taken(old_TBKX[:, part.rows], window_SBK, 0)
        return replace(self, parts=kept), slab_TBKX

    def _exact(self, window: KVSlab, part: QuantisedRows, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of slots [first, end) in the window, in the layer's dtype.

        They are views if the window has that dtype, too.
        """
        slots_SBKX = window.slab_TBKX[first - window.first : end - window.first, part.rows].to(self.shape.dtype)
        slots_BKSX = slots_SBKX.permute(1, 2, 0, 3)
        return slots_BKSX[..., : self.shape.key_dim], slots_BKSX[..., self.shape.key_dim :]
