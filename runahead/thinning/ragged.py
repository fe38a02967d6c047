"""A layer of the KV cache whose KV heads store different numbers of tokens.

The tokens of a row and KV head are a sequence of their own. All sequences lie one after another in flat memory, each
followed by room for new tokens, so a head that keeps few tokens takes little memory. Padding is not stored.
"""

# Legend: B batch, N query heads, K kv heads, S = B * K sequences, G = N / K, C new tokens, n tokens of the longest
# sequence, m kept ones, T rows of memory, Y some of them, H key dim, V value dim, X = H + V, D = G * C.

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.op import EVERY_ROW, Lengths, Run, Span, Step, spans_of
from runahead.attention.partial import AttentionTerms, KeyBias, takes_sequences
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, KVSlab
from runahead.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class DroppedTokens:
    """Tokens that the KV heads of a layer dropped. Attention takes each of them for the mean of all (RazorAttention).

    Attributes:
        sum_BKX: sum of their keys and values, in at least float32.
        count_BK: their number, in the same dtype.
    """

    sum_BKX: Tensor
    count_BK: Tensor

    @classmethod
    def of(cls, layer: KeptLayer, slots_BKm: Tensor) -> DroppedTokens:
        """The tokens of a layer that are in no slot of `slots_BKm`, and those that it dropped before."""
        kv_BKnX = layer.kv_BKnX()
        stays_BKn = torch.zeros(*kv_BKnX.shape[:2], layer.num_slots + 1, dtype=torch.bool, device=kv_BKnX.device)
        stays_BKn = stays_BKn.scatter_(2, slots_BKm + 1, True)[..., 1:]  # without the place of -1
        stays_BKn |= layer.positions_BKn() < 0  # padding, which may hold anything
        wide = torch.promote_types(kv_BKnX.dtype, torch.float32)
        sum_BKX = kv_BKnX.masked_fill(stays_BKn[..., None], 0).sum(dim=2, dtype=wide)
        count_BK = (~stays_BKn).sum(dim=2).to(wide)
        before = layer.dropped if isinstance(layer, RaggedLayer) else None
        if before is not None:
            sum_BKX, count_BK = sum_BKX + before.sum_BKX, count_BK + before.count_BK
        return cls(sum_BKX=sum_BKX, count_BK=count_BK)

    def row(self, row: int) -> DroppedTokens:
        """Those of one row."""
        return DroppedTokens(sum_BKX=self.sum_BKX[row : row + 1], count_BK=self.count_BK[row : row + 1])

    @property
    def num_bytes(self) -> int:
        return self.sum_BKX.nbytes + self.count_BK.nbytes

    def attend(self, q_BNCH: Tensor, shape: KVShape, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
        """Output (B, N, C, V) and log-sum-exp (B, N, C) of attention to the mean, as often as there are tokens."""
        mean_BKX = self.sum_BKX / self.count_BK.clamp_min(1)[..., None]
        k_BK1H, v_BK1V = (x[:, :, None] for x in mean_BKX.split([shape.key_dim, shape.value_dim], dim=-1))
        q_BKDH = q_BNCH.unflatten(1, (shape.num_kv_heads, -1)).flatten(2, 3).to(k_BK1H.dtype)
        scores_BNC = (q_BKDH @ k_BK1H.mT * terms.scaling).reshape(q_BNCH.shape[:3])
        if terms.softcap is not None:
            scores_BNC = terms.softcap * torch.tanh(scores_BNC / terms.softcap)
        group = q_BNCH.shape[1] // shape.num_kv_heads
        weights_BN1 = self.count_BK.log().repeat_interleave(group, dim=1)[..., None]  # of none: minus infinity
        out_BNCV = v_BK1V.repeat_interleave(group, dim=1).expand(-1, -1, q_BNCH.shape[2], -1)
        return out_BNCV, scores_BNC + weights_BN1


@dataclass(kw_only=True)
class RaggedLayer(KeptLayer):
    """One layer, in which each row and KV head has a number of tokens of its own.

    Memory has one row and one KV head, (T, 1, 1, X). For policies, which look at all heads at once, a sequence has
    slots as if it were padded on the left to the longest one: the last slot holds the newest token of every head.

    Attributes:
        lengths: number of tokens of each sequence, row by row, in each row head by head.
        starts: where each sequence starts in memory, and the end of the last (S + 1).
        room: number of new tokens for which each sequence has room.
        dropped: the mean of what each sequence dropped, if it stands for these tokens.
    """

    lengths: Sequence[int]
    starts: Sequence[int]
    room: int
    dropped: DroppedTokens | None = None
    _starts: Tensor = field(init=False, repr=False)
    _used_S: Tensor = field(init=False, repr=False)
    _next_S: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._locate()
        self._count()

    @classmethod
    def of(
        cls,
        layer: KeptLayer,
        slots_BKm: Tensor,
        *,
        room: int,
        compensates: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> RaggedLayer:
        """Copy some slots of a layer to memory of their own.

        Args:
            slots_BKm: slots to copy, ascending; -1 in the first places of a head that keeps fewer than m.
            room: new tokens for which to make room.
            compensates: whether the mean of all other tokens stands for them.
            lengths: number of slots of each sequence that are not -1; by default the host waits for them.
        """
        assert layer.first == 0, "all tokens are stored"
        heads, num_slots = layer.shape.num_kv_heads, slots_BKm.shape[2]
        if lengths is None:
            lengths = (slots_BKm >= 0).sum(dim=-1).flatten().tolist()
        starts = _starts_of(lengths, room)
        kept_Y = rows_of(last_places(num_slots, lengths), lengths, slots_BKm.device)
        from_Y = _rows_of_slots(layer, slots_BKm).flatten().index_select(0, kept_Y)
        to_Y = rows_of(starts, lengths, from_Y.device)

        def taken(values_TBK: Tensor) -> Tensor:
            if values_TBK.shape[2] != layer.slab_TBKX.shape[2]:  # the same in all heads
                values_TBK = values_TBK.expand(-1, -1, heads)
            flat = values_TBK.flatten(0, 2)
            new = flat.new_empty(starts[-1], 1, 1, *flat.shape[1:])
            return new.index_copy_(0, to_Y, flat.index_select(0, from_Y)[:, None, None])

        return cls(
            shape=layer.shape,
            slab_TBKX=taken(layer.slab_TBKX),
            placed_TBK=taken(layer.positions_TBK),
            carried={policy: taken(each_TBK) for policy, each_TBK in layer.carried.items()},
            pads=[],
            alike=False,
            rotary=layer.rotary,
            lengths=lengths,
            starts=starts,
            room=room,
            dropped=DroppedTokens.of(layer, slots_BKm) if compensates else None,
        )

    def dense(self, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int]) -> KeptLayer:
        """Copy as many slots of every head to a layer whose heads store equally many; some may be padding.

        Args:
            tokens_B: number of these slots that hold tokens, in each head of a row.
        """

        def taken(values_BKn: Tensor) -> Tensor:
            index = slots_BKm.reshape(*slots_BKm.shape, *[1] * (values_BKn.ndim - 3))
            kept_mBK = values_BKn.take_along_dim(index, dim=2).movedim(2, 0)
            new = kept_mBK.new_empty(len(kept_mBK) + room, *kept_mBK.shape[1:])
            new[: len(kept_mBK)] = kept_mBK
            return new

        num_kept = slots_BKm.shape[2]
        return KeptLayer(
            shape=self.shape,
            slab_TBKX=taken(self.kv_BKnX()),
            placed_TBK=taken(self.positions_BKn()),
            carried={policy: taken(self._padded(each_TBK[:, 0, 0], 0)) for policy, each_TBK in self.carried.items()},
            pads=[num_kept - tokens for tokens in tokens_B],
            alike=False,
            rotary=self.rotary,
            num_slots=num_kept,
        )

    def _locate(self) -> None:
        """Tell the device where the sequences are, how long they are, and where their next tokens are stored."""
        starts, used_S = (row_values(each, self.slab_TBKX.device) for each in (self.starts, self.lengths))
        self._starts, self._used_S, self._next_S = starts.int(), used_S.int(), starts[:-1] + used_S

    @property
    def stored(self) -> Sequence[int]:
        """Number of tokens of each sequence."""
        return self.lengths

    @property
    def tokens_per_head(self) -> int:
        """Mean number of tokens of a row's KV heads, rounded up; of the row with most."""
        return -(-max(map(sum, self.tokens_BK)) // self.shape.num_kv_heads)

    @property
    def tokens_BK(self) -> list[list[int]]:  # noqa: N802
        heads, stored = self.shape.num_kv_heads, self.stored
        return [list(stored[first : first + heads]) for first in range(0, len(stored), heads)]

    @property
    def head_pads(self) -> list[list[int]]:
        return [[self.num_slots - tokens for tokens in tokens_K] for tokens_K in self.tokens_BK]

    def _count(self) -> None:
        """Update the number of slots, and those on the left of each row that are padding in all heads."""
        longest = [max(tokens_K) for tokens_K in self.tokens_BK]
        self.num_slots = max(longest)
        self.pads = [self.num_slots - tokens for tokens in longest]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: as of `KeptLayer`, where the sequences are, and what stands for dropped tokens."""
        dropped = 0 if self.dropped is None else self.dropped.num_bytes
        return super().num_bytes + self._starts.nbytes + self._used_S.nbytes + self._next_S.nbytes + dropped

    def slab(self) -> KVSlab:
        raise NotImplementedError("a layer whose heads store different numbers of tokens is no slab")

    def sequences(self, pads: Sequence[int]) -> list[KVSlab]:
        """The tokens of each sequence, as one KV head of one row, in place, numbered from `pads` on."""
        return [
            KVSlab(slab_TBKX=self.slab_TBKX[start : start + length], key_dim=self.shape.key_dim, first=pad)
            for start, length, pad in zip(self.starts, self.lengths, pads, strict=False)
        ]

    def positions_BKn(self) -> Tensor:  # noqa: N802
        return self._padded(self.positions_TBK[:, 0, 0], -1)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        return self._padded(self.slab_TBKX[:, 0, 0], 0)

    def carried_BKn(self, policy: Hashable) -> Tensor | None:  # noqa: N802
        return self._padded(self.carried[policy][:, 0, 0], 0) if policy in self.carried else None

    def _padded(self, values_T: Tensor, padding: int) -> Tensor:
        """A copy of the values of all sequences (B, K, n, ...), padded on the left."""
        out_Sn = values_T.new_full((len(self.lengths), self.num_slots, *values_T.shape[1:]), padding)
        for out_n, start, length in zip(out_Sn, self.starts, self.lengths, strict=False):
            out_n[self.num_slots - length :] = values_T[start : start + length]
        return out_Sn.unflatten(0, (-1, self.shape.num_kv_heads))

    def carry(self, values_BKn: Tensor, policy: Hashable) -> None:
        carried_T = values_BKn.new_zeros(len(self.slab_TBKX))
        for values_n, start, length in zip(values_BKn.flatten(0, 1), self.starts, self.lengths, strict=False):
            carried_T[start : start + length] = values_n[self.num_slots - length :]
        self.carried = {**self.carried, policy: carried_T[:, None, None]}

    def store(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        heads, num_new, device = self.shape.num_kv_heads, k_BKCH.shape[2], k_BKCH.device
        if num_new > self.room:  # an eighth more, so that growing token by token stays cheap
            self.copy_out(room=num_new + sum(self.lengths) // len(self.lengths) // 8)
        new_S: list[int] = [num_new - pad for pad in new_pads for _ in range(heads)]
        rows_Y = self._next_S
        if any(new_pads):  # on the left of a row, which has no tokens yet
            is_token_SC = (positions_BC >= 0).repeat_interleave(heads, dim=0)
            pads_S1 = row_values([num_new - new for new in new_S], device)[:, None]
            rows_Y = (self._newest(num_new) + num_new - pads_S1)[is_token_SC]
            kv_YX = torch.cat([k_BKCH, v_BKCV], dim=-1).flatten(0, 1)[is_token_SC]
            k_BKCH, v_BKCV = (x[None, :, None] for x in kv_YX.split([self.shape.key_dim, self.shape.value_dim], dim=-1))
            self._place()
            positions_Y = positions_BC.repeat_interleave(heads, dim=0)[is_token_SC]
            self.placed_TBK[:, 0, 0].index_copy_(0, rows_Y, positions_Y.int())
            counts_S: Tensor | int = num_new - pads_S1[:, 0]
        else:
            if num_new > 1:
                rows_Y = (self._newest(num_new) + num_new).flatten()
            self._unplaced.append(positions_BC)
            counts_S = num_new
        self.memory.write(rows_Y, k_BKCH, v_BKCV)
        for each_TBK in self.carried.values():
            each_TBK[:, 0, 0].index_fill_(0, rows_Y, 0)
        self._used_S += counts_S
        self._next_S += counts_S
        self.lengths = [length + new for length, new in zip(self.lengths, new_S, strict=True)]
        self.room -= num_new
        self._count()

    def set_end(self, end: int) -> None:
        self._place()
        num_taken = self.first + self.num_slots - end
        self.lengths, self.room = [length - num_taken for length in self.lengths], self.room + num_taken
        with torch.inference_mode():  # as the forward, which is over
            self._used_S -= num_taken
            self._next_S -= num_taken
        self._count()

    def row(self, row: int) -> RaggedLayer:
        heads = self.shape.num_kv_heads
        first, stop = row * heads, (row + 1) * heads
        rows = slice(self.starts[first], self.starts[stop])
        return replace(
            self,
            slab_TBKX=self.slab_TBKX[rows],
            placed_TBK=self.positions_TBK[rows],
            pads=[],
            carried={policy: each_TBK[rows] for policy, each_TBK in self.carried.items()},
            queries={first: each.row(row) for first, each in self.queries.items()},
            lengths=self.lengths[first:stop],
            starts=[start - self.starts[first] for start in self.starts[first : stop + 1]],
            dropped=None if self.dropped is None else self.dropped.row(row),
        )

    def _newest(self, num: int) -> Tensor:
        """Rows (S, num) of memory of each sequence's last tokens."""
        return self._next_S[:, None] + torch.arange(-num, 0, device=self._next_S.device)

    def _place_newest(self, positions_BC: Tensor) -> None:
        rows_Y = self._newest(positions_BC.shape[1]).flatten()
        positions_Y = positions_BC.repeat_interleave(self.shape.num_kv_heads, dim=0).flatten()
        self.placed_TBK[:, 0, 0].index_copy_(0, rows_Y, positions_Y.int())

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        # A token that another rank stores sees all of its sequence, as the last one of it does.
        assert tokens.part is None or q_BNCH.shape[2] == 1, q_BNCH.shape
        dropped, read = self.dropped, self
        if self.rotary is not None:
            read, q_BNCH = self._at_slots(self.rotary, q_BNCH)
        return SeenKV(
            q_BNCH=q_BNCH,
            steps=read.steps(q_BNCH, tokens.pads(q_BNCH.shape[2])),
            whole=read.read,
            positions=self.positions_BKn,
            num_sequences=self.shape.num_kv_heads,
            rest=None if dropped is None else lambda terms, _: dropped.attend(q_BNCH, self.shape, terms),
        )

    def _at_slots(self, rotary: Rotary, q_BNCH: Tensor) -> tuple[RaggedLayer, Tensor]:
        """This layer with keys rotated to their places in their sequences, and the newest queries, to theirs."""
        assert self.dropped is None and not self.in_few_bits, "a mean has no place; codes are of rotated keys"
        key_dim, device = self.shape.key_dim, q_BNCH.device
        firsts_T = self._starts[:-1].repeat_interleave(self._starts.diff(), output_size=self.starts[-1])
        places_T = torch.arange(self.starts[-1], device=device) - firsts_T
        k_1TH, v_1TV = self.slab_TBKX[:, 0].movedim(1, 0).split([key_dim, self.shape.value_dim], dim=-1)
        k_1TH = rotary.turned(k_1TH[None], places_T[None])[0]
        read = copy(self)
        read._hold(torch.cat([k_1TH, v_1TV], dim=-1)[0, :, None, None])
        read.placed_TBK, read._unplaced = places_T[:, None, None], []
        places_SC = (self._used_S[:, None] + torch.arange(-q_BNCH.shape[2], 0, device=device)).clamp_min(0)
        q_SGCH = q_BNCH.reshape(len(self.lengths), -1, *q_BNCH.shape[2:])
        return read, rotary.turned(q_SGCH, places_SC).reshape(q_BNCH.shape)

    def steps(self, q_BNCH: Tensor, new_pads: Sequence[int]) -> list[Step]:
        """Where the tokens lie that the newest ones see, with each sequence as a row of one head.

        Args:
            new_pads: number of padding tokens among the newest ones, by row; above 0 in rows without tokens before.
        """
        num_new, shape = q_BNCH.shape[2], self.shape
        pads = [pad for pad in new_pads for _ in range(shape.num_kv_heads)]

        def apart() -> list[Run]:
            # Counted in slots, which are in causal order whichever tokens they hold.
            return [
                Run(slab, _span_of(slab, number, pad, num_new), self._biased(number, pad, q_BNCH.shape[1]))
                for number, (slab, pad) in enumerate(zip(self.sequences(pads), pads, strict=True))
            ]

        takes = takes_sequences(q_BNCH.device, q_BNCH.dtype, shape.key_dim, shape.value_dim)
        if num_new > 1 or any(new_pads) or not takes or not self.num_slots:
            return [Step(apart())]
        lengths = Lengths(
            starts=self._starts,
            seen_S=self._used_S,
            room=max(self.lengths),
            may_be_empty=0 in self.lengths,
            places=[range(first, first + num) for first, num in zip(self.starts, self.lengths, strict=False)],
            apart=apart,
        )
        return [Step([Run(self.memory, lengths)])]

    def _biased(self, number: int, pad: int, num_heads: int) -> Callable[[KeyBias, slice | Tensor, slice], Tensor]:
        """The bias of the tokens of a sequence at their positions, as of `Run`, for the query heads of its KV head."""
        heads = self.shape.num_kv_heads
        own, first = slice(number % heads, number % heads + 1), self.starts[number] - pad

        def bias(key_bias: KeyBias, _: slice | Tensor, slots: slice) -> Tensor:
            positions_S = self.positions_TBK[first + slots.start : first + slots.stop, 0, 0]
            return key_bias(positions_S).unflatten(0, (heads, -1))[own].flatten(0, 1)[None]

        return bias

    def read(self) -> tuple[Tensor, Tensor]:
        """A copy of all keys (B, K, n, H) and values (B, K, n, V), padded on the left to the longest head."""
        kv_BKnX, key_dim = self.kv_BKnX(), self.shape.key_dim
        return kv_BKnX[..., :key_dim], kv_BKnX[..., key_dim:]

    def keep(self, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int] | None = None) -> None:
        raise NotImplementedError("heads of other lengths need other memory; use cut_back")

    def free(self, *, room: int) -> None:
        if self.starts[-1] != sum(self.lengths) + room * len(self.lengths):
            self.copy_out(room=room)

    def copy_out(self, *, room: int) -> None:
        starts = _starts_of(self.lengths, room)

        def moved(old: Tensor) -> Tensor:
            new = old.new_empty(starts[-1], *old.shape[1:])
            for to, start, length in zip(starts, self.starts, self.lengths, strict=False):
                new[to : to + length] = old[start : start + length]
            return new

        self.placed_TBK = moved(self.positions_TBK)
        self._hold(moved(self.slab_TBKX))
        self.carried = {policy: moved(each_TBK) for policy, each_TBK in self.carried.items()}
        self.starts, self.room = starts, room
        self._locate()

    def fork(self, *, copy: bool) -> RaggedLayer:
        self._place()
        other = replace(self, room=0)
        if copy:
            other.copy_out(room=0)
        return other


def _span_of(slab: KVSlab, number: int, pad: int, num_new: int) -> list[Span]:
    """The tokens of a sequence, as a row of their own."""
    spans = spans_of(range(slab.first, slab.end), start=slab.end - num_new, num_new=num_new, pads=[pad])
    return [replace(span, rows=slice(number, number + 1), stored=EVERY_ROW) for span in spans]


def _starts_of(lengths: Sequence[int], room: int) -> list[int]:
    """Where each sequence starts if all have the same room after them, and the end of the last."""
    return list(accumulate((length + room for length in lengths), initial=0))


def rows_of(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Rows of memory that hold tokens, sequence by sequence."""
    firsts = accumulate(lengths, initial=0)
    shifts_S = sent(torch.tensor([start - first for start, first in zip(starts, firsts, strict=False)]), device)
    lengths_S, total = sent(torch.tensor(lengths), device), sum(lengths)
    return shifts_S[: len(lengths)].repeat_interleave(lengths_S, output_size=total) + torch.arange(total, device=device)


def last_places(num_slots: int, counts: Sequence[int]) -> list[int]:
    """Flat index at which the last `count` of each sequence's `num_slots` slots begin."""
    return [num_slots * (number + 1) - count for number, count in enumerate(counts)]


def _rows_of_slots(layer: KeptLayer, slots_BKm: Tensor) -> Tensor:
    """Rows (B, K, m) of a layer's memory, seen as a (T * B * K, X) matrix, that hold these slots."""
    batch, heads = slots_BKm.shape[:2]
    device = slots_BKm.device
    if isinstance(layer, RaggedLayer):
        ends_S = layer._starts[:-1] + layer._used_S
        return slots_BKm - layer.num_slots + ends_S.view(batch, heads, 1)
    rows_B11, heads_K1 = torch.arange(batch, device=device)[:, None, None], torch.arange(heads, device=device)[:, None]
    return (slots_BKm * batch + rows_B11) * heads + heads_K1
