"""A layer whose newest tokens are stored in 16 bits or as they are, and all before these in 8, 4 or 2 bits (KIVI).

Tokens leave the window of the newest ones in whole groups of 32. Groups begin at a row's first token, so a row of a
padded batch has the same groups as alone. Generated and given tokens attend to blocks of the quantised tokens and to
the window; at no time is more than a block dequantised, but for a policy that looks at all keys of a layer.
"""

# Legend: T slots with room, n stored slots, m kept ones, B batch, N query heads, K kv heads, G query heads per KV head,
# C new tokens, S quantised tokens, H key dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from runahead.attention.op import EVERY_ROW, Codec, Part, Run, Span, Step, rows_by_pad
from runahead.attention.partial import AttentionTerms, attend, merge
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer, taken
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.groups import (
    GROUP,
    ChannelGroups,
    TokenGroups,
    blocks,
    dtype_of_16_bits,
    narrowed,
)
from runahead.cache.slabs import KVShape, KVSlab


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
    keys: ChannelGroups | TokenGroups
    values: TokenGroups
    scales: ChannelScales | None = None

    @classmethod
    def empty(
        cls, k_BK0H: Tensor, v_BK0V: Tensor, bits: int, *, rows: slice, pad: int, by_token: bool
    ) -> QuantisedRows:
        """Rows without quantised tokens."""
        scales = ChannelScales.of(k_BK0H) if by_token else None
        keys = ChannelGroups.of(k_BK0H, bits) if scales is None else scales.groups(k_BK0H, bits)
        return cls(rows=rows, pad=pad, keys=keys, values=TokenGroups.of(v_BK0V, bits), scales=scales)

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
        values = TokenGroups.joined([self.values, TokenGroups.of(v_BKSV, self.values.bits)])
        if isinstance(self.keys, ChannelGroups):
            keys = ChannelGroups.joined([self.keys, ChannelGroups.of(k_BKSH, self.keys.bits)])
            return replace(self, keys=keys, values=values)
        scales = self.scales if self.scales is not None and self.num_tokens else ChannelScales.of(k_BKSH)
        by_token = TokenGroups.joined([self.keys, scales.groups(k_BKSH, self.keys.bits)])
        return replace(self, keys=by_token, values=values, scales=scales)

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
        first, sees_all = start - self.pad, terms.rule is None or terms.rule.sees_everything
        assert end == self.end, "queries see all quantised tokens from the first one that they see"
        if q_BNCH.shape[2] == 1 and sees_all and not terms.needs_scores and isinstance(self.keys, ChannelGroups):
            return self.attend_one(q_BNCH, terms.scaling)
        found: Part | None = None
        for begin, stop in blocks(self.num_tokens):  # each is dequantised for it
            if stop > first:
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
class QuantisedLayer(KeptLayer):
    """One layer in slots: the padding of each row, its quantised tokens, and the window of its newest ones.

    Attributes:
        slab_TBKX: the slots from `start` on, in `window_dtype`; in that of `shape` until they are first copied.
        bits: of a code.
        residual: a row has at least so many tokens in the window, if it has so many.
        window_dtype: of the tokens in the window.
        parts: the quantised tokens of all rows.
        start: the first slot that is in `slab_TBKX`.
        becomes_ragged: whether cutting it back makes it ragged, however many tokens each head keeps. Heads of other
            rows may differ, and which tokens are quantised then does not depend on these.
    """

    bits: int
    residual: int
    window_dtype: torch.dtype
    becomes_ragged: bool
    parts: list[QuantisedRows] = field(default_factory=list)
    start: int = 0

    @classmethod
    def of(
        cls,
        layer: KeptLayer,
        *,
        bits: int,
        residual: int,
        residual_bits: int | None,
        keys_by_token: bool,
        becomes_ragged: bool = False,
        room: int,
    ) -> QuantisedLayer:
        """Quantise a layer. Its memory is only read.

        Args:
            residual_bits: 16, or None for the layer's dtype: of the numbers in the window.
            keys_by_token: group keys by token rather than by channel, as single tokens are dropped later.
            room: new tokens for which there is room.
        """
        assert layer.first == 0 and layer.rotary is None, (layer.first, layer.rotary)
        k_BK0H, v_BK0V = layer.slab().read(0, 0)
        parts = [
            QuantisedRows.empty(k_BK0H[rows], v_BK0V[rows], bits, rows=rows, pad=pad, by_token=keys_by_token)
            for rows, pad in rows_by_pad(layer.pads)
        ]
        kept = layer.fields_of(KeptLayer, "host")
        window_dtype = dtype_of_window(layer.shape, residual_bits)
        made = cls(
            **kept, bits=bits, residual=residual, window_dtype=window_dtype, parts=parts, becomes_ragged=becomes_ragged
        )
        made.flush()
        made.copy_out(room=room)
        return made

    def memory_of(self, slab_TBKX: Tensor) -> KVSlab:
        if slab_TBKX.dtype == self.shape.dtype:
            return KVSlab(slab_TBKX=slab_TBKX, key_dim=self.shape.key_dim, first=self.start)
        return _Window(slab_TBKX=slab_TBKX, key_dim=self.shape.key_dim, first=self.start, dtype=self.shape.dtype)

    @property
    def in_few_bits(self) -> bool:
        return True

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.code_bytes

    @property
    def code_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.num_bytes for part in self.parts)

    def store(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        super().store(k_BKCH, v_BKCV, positions_BC, new_pads)
        if k_BKCH.shape[2] == 1:  # several attend to each other first
            self.flush()

    def quantised_end(self, room: int) -> int:
        """The first slot that is in the window of all rows, once there are `room` more tokens."""
        before = [self.num_slots + room - part.end - self.residual for part in self.parts]
        return max(part.end + max(0, num // GROUP * GROUP) for part, num in zip(self.parts, before, strict=True))

    def flush(self, *, coming: int = 0) -> None:
        """Quantise the whole groups of tokens before the last `residual` ones of each row.

        Args:
            coming: number of tokens that are about to be stored, which are counted among the last ones.
        """
        for place, part in enumerate(self.parts):
            num = (self.num_slots + coming - part.end - self.residual) // GROUP * GROUP
            if num > 0:
                self.parts[place] = self._grown(part, *self.exact(part, part.end, part.end + num))

    def _grown(self, part: QuantisedRows, k_BKSH: Tensor, v_BKSV: Tensor) -> QuantisedRows:
        """Some rows with more quantised tokens, which come after the others."""
        return part.grown(k_BKSH, v_BKSV)

    def exact(self, part: QuantisedRows, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of slots [first, end) that are in the window, in the layer's dtype.

        They are views if the window has that dtype, too.
        """
        slots_SBKX = self.slab_TBKX[first - self.start : end - self.start, part.rows].to(self.shape.dtype)
        slots_BKSX = slots_SBKX.permute(1, 2, 0, 3)
        return slots_BKSX[..., : self.shape.key_dim], slots_BKSX[..., self.shape.key_dim :]

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        if tokens.part is not None:
            return super().seen(q_BNCH, tokens)
        num_new, end = q_BNCH.shape[2], self.num_slots
        places = tuple((part.pad, part.end) for part in self.parts)
        exact, coded = tokens.once((num_new, end, places), lambda: self._spans(num_new))
        bias = self.biased_by(q_BNCH.shape[1])
        runs = [Run(part, [span], bias) for part, span in zip(self.parts, coded, strict=True) if part.num_tokens]
        steps = [Step([Run(self.memory, exact, bias)])] + ([Step(runs)] if runs else [])
        return SeenKV(q_BNCH=q_BNCH, steps=steps, whole=lambda: self.slab().read(0, end), positions=self.positions_BKn)

    def _spans(self, num_new: int) -> tuple[list[Span], list[Span]]:
        """By part, the tokens in the window and the quantised ones as the newest tokens see them."""
        exact, coded, end = list[Span](), list[Span](), self.num_slots
        for part in self.parts:
            window, before = range(part.end, end), range(part.pad, part.end)
            span = Span(
                rows=part.rows,
                stored=part.rows,
                pad=part.pad,
                slots=window,
                at=window,
                queries=range(num_new),
                positions=range(end - num_new - part.pad, end - part.pad),
                has_new=True,
            )
            exact.append(span)
            coded.append(replace(span, stored=EVERY_ROW, slots=before, at=before, has_new=False))
        return exact, coded

    def slab(self) -> KVSlab:
        """All slots, dequantised, in new memory; padding is 0."""
        key_dim, dtype = self.shape.key_dim, self.shape.dtype
        slab_TBKX = self.slab_TBKX.new_zeros(self.num_slots, *self.slab_TBKX.shape[1:], dtype=dtype)
        for part in self.parts:
            for first, end in blocks(part.num_tokens):
                slots_SBKX = slab_TBKX[part.pad + first : part.pad + end, part.rows]
                slots_SBKX[..., :key_dim] = part.read_keys(first, end, dtype).permute(2, 0, 1, 3)
                slots_SBKX[..., key_dim:] = part.values.read(first, end, dtype).permute(2, 0, 1, 3)
            window = slice(part.end - self.start, self.num_slots - self.start)
            slab_TBKX[part.end :, part.rows] = self.slab_TBKX[window, part.rows]
        return KVSlab(slab_TBKX=slab_TBKX, key_dim=key_dim, first=0)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        return self.slab().slab_TBKX.permute(1, 2, 0, 3)

    def fork(self, *, copy: bool) -> KeptLayer:
        self._place()
        other = replace(self, parts=list(self.parts))
        if copy:
            other.copy_out(room=0)
            return other
        n = self.num_slots
        other.slab_TBKX, other.placed_TBK = self.slab_TBKX[: n - self.start], self.placed_TBK[:n]
        other.carried = self.forked_carried()
        return other

    def free(self, *, room: int) -> None:
        if self.slab_TBKX.shape[0] != self.num_slots - self._window_start + room:
            self.copy_out(room=room)

    def copy_out(self, *, room: int) -> None:
        start = self._window_start
        window_TBKX = self.slab_TBKX[start - self.start : self.num_slots - self.start]
        shape = len(window_TBKX) + room, *window_TBKX.shape[1:]
        slab_TBKX = window_TBKX.new_empty(shape, dtype=self.window_dtype)
        slab_TBKX[: len(window_TBKX)] = narrowed(window_TBKX, self.window_dtype)
        self._hold(slab_TBKX)
        self.start = start
        self._resize_positions(room)

    @property
    def _window_start(self) -> int:
        """The first slot that is in the window of any row."""
        return min(part.end for part in self.parts)

    def _reserve(self, num_new: int) -> None:
        if self.num_slots + num_new > self.start + self.slab_TBKX.shape[0]:
            self.copy_out(room=num_new - 1 + GROUP)

    def _write(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.memory.write(self.num_slots, *(narrowed(x, self.window_dtype) for x in (k_BKCH, v_BKCV)))

    def _keep_kv(self, slots_mBK: Tensor, kept_pads: list[int], room: int) -> None:
        """Keep slots of a layer whose keys are grouped by token.

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
                assert isinstance(part.keys, TokenGroups), "a group of several tokens cannot lose one of them"
                num_dropped = self.num_slots - part.pad - (num_kept - pad)
                whole = part.grown(*self.exact(part, part.end, min(self.num_slots, part.end + num_dropped)))
                assert isinstance(whole.keys, TokenGroups)
                chosen = slots_BKm[..., :num_quantised] - part.pad
                part = replace(whole, keys=whole.keys.take(chosen), values=whole.values.take(chosen))
            kept.append(replace(part, pad=pad))
            windows.append(slots_BKm[..., num_quantised:].permute(2, 0, 1) - self.start)
        start = min(part.end for part in kept)
        slab_TBKX = self.slab_TBKX.new_empty(num_kept - start + room, *self.slab_TBKX.shape[1:])
        for part, window_SBK in zip(kept, windows, strict=True):
            slots = slice(part.end - start, num_kept - start)
            slab_TBKX[slots, part.rows] = taken(self.slab_TBKX[:, part.rows], window_SBK, 0)
        self._hold(slab_TBKX)
        self.start, self.parts = start, kept


@dataclass(frozen=True, kw_only=True)
class _Window(KVSlab):
    """Slots that are read in another dtype than they are stored in."""

    dtype: torch.dtype

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_BKSH, v_BKSV = super().read(start, end)
        return k_BKSH.to(self.dtype), v_BKSV.to(self.dtype)


def dtype_of_window(shape: KVShape, residual_bits: int | None) -> torch.dtype:
    """The dtype of a layer's newest tokens."""
    return shape.dtype if residual_bits is None else dtype_of_16_bits(shape.dtype)


def code_bytes(shape: KVShape, num_tokens: int, bits: int, *, keys_by_token: bool) -> int:
    """Bytes of the quantised tokens of one KV head of one row."""
    keys: type[ChannelGroups | TokenGroups] = TokenGroups if keys_by_token else ChannelGroups
    scales = ChannelScales.bytes_of(shape.key_dim) if keys_by_token else 0
    values = TokenGroups.bytes_of(num_tokens, shape.value_dim, bits)
    return keys.bytes_of(num_tokens, shape.key_dim, bits) + scales + values


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
    num_quantised = max(0, (num_tokens - residual) // GROUP * GROUP)
    total = 0
    for shape in shapes:
        total += batch * shape.num_kv_heads * code_bytes(shape, num_quantised, bits, keys_by_token=keys_by_token)
        window = replace(shape, dtype=dtype_of_window(shape, residual_bits))
        total += (num_tokens - num_quantised + room) * window.bytes_per_token(batch)
        total += (num_tokens + room) * batch * torch.int32.itemsize
    return total
