"""A layer of the KV cache whose KV heads store different numbers of tokens.

The tokens of a row and KV head are a sequence of their own. All sequences lie one after another in flat memory, each
followed by room for new tokens, so a head that keeps few tokens takes little memory. Padding is not stored. In few bits
each sequence is quantised by itself, as a row of a dense layer: its first tokens in groups, its newest ones exact.
"""

# Legend: B batch, N query heads, K kv heads, S = B * K sequences, G = N / K, C new tokens, n tokens of the longest
# sequence, m kept ones, T rows of memory, Y some of them, H key dim, V value dim, X = H + V, D = G * C.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.op import EVERY_ROW, Lengths, Run, Span, Step, spans_of
from runahead.attention.partial import KeyBias, takes_sequences
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import Groups, TokenGroups, narrowed
from runahead.cache.quantised.sequences import QuantisedSequences
from runahead.cache.slabs import KVSlab
from runahead.rotary import Rotary


@dataclass(kw_only=True)
class RaggedLayer(KeptLayer):
    """One layer, in which each row and KV head has a number of tokens of its own.

    Memory has one row and one KV head, (T, 1, 1, X). For policies, which look at all heads at once, a sequence has
    slots as if it were padded on the left to the longest one: the last slot holds the newest token of every head.

    Attributes:
        slab_TBKX, positions_TBK, carried: of exact tokens.
        lengths: number of exact tokens of each sequence, row by row, in each row head by head.
        starts: where each sequence starts in memory, and the end of the last (S + 1).
        room: number of new tokens for which each sequence has room.
        coded: the tokens of each sequence before all of these, if they are in few bits.
    """

    lengths: Sequence[int]
    starts: Sequence[int]
    room: int
    coded: QuantisedSequences | None = None
    _starts: Tensor = field(init=False, repr=False)
    _used_S: Tensor = field(init=False, repr=False)
    _next_S: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._locate()
        self._count()

    @classmethod
    def from_slots(
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
        from_Y = layer.rows_of(slots_BKm).flatten().index_select(0, kept_Y)
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
            dropped=layer.all_but(slots_BKm) if compensates else None,
        )

    @classmethod
    def of_codes(cls, layer: KeptLayer) -> RaggedLayer:
        """The tokens of a layer of equal heads in few bits, without padding. The codes stay as they are."""
        assert layer.codes is not None
        heads, num_slots, batch = layer.shape.num_kv_heads, layer.num_slots, len(layer.pads)
        window = KeptLayer(
            shape=layer.shape,
            slab_TBKX=layer.slab_TBKX[: num_slots - layer.start],
            placed_TBK=layer.positions_TBK[layer.start : num_slots],
            pads=[0] * batch,
            num_slots=num_slots - layer.start,
            rotary=layer.rotary,
            carried={policy: each_TBK[layer.start : num_slots] for policy, each_TBK in layer.carried.items()},
        )
        parts = layer.codes.parts
        by_row = {row: part for part in parts for row in range(batch)[part.rows]}
        slots_n = torch.arange(window.num_slots, device=layer.slab_TBKX.device)
        ends = [by_row[row].end - layer.start for row in range(batch)]
        ends_B11 = row_values(ends, slots_n.device)[:, None, None]
        exact = [window.num_slots - end for end in ends for _ in range(heads)]
        slots_BKn = slots_n.where(slots_n >= ends_B11, -1).expand(-1, heads, -1)

        def flat(values_TBK: Tensor) -> Tensor:
            values = [values_TBK[part.pad : part.end, part.rows].expand(-1, -1, heads) for part in parts]
            return torch.cat([each.permute(1, 2, 0).flatten() for each in values])

        scales = [part.scales.by_head() for part in parts if part.scales is not None]
        coded = QuantisedSequences(
            keys=Groups.joined([part.keys.in_line() for part in parts]),
            values=TokenGroups.joined([part.values.in_line() for part in parts]),
            positions_T=flat(layer.positions_TBK),
            carried={policy: flat(each_TBK) for policy, each_TBK in layer.carried.items()},
            lengths=[by_row[row].num_tokens for row in range(batch) for _ in range(heads)],
            scales=ChannelScales.joined(scales) if scales else None,
        )
        return cls.from_slots(window, slots_BKn, room=0, lengths=exact).after(layer.few, coded)

    def after(self, few: FewBits | None, coded: QuantisedSequences | None) -> RaggedLayer:
        """The same tokens, with those in few bits before them."""
        self._place()
        return replace(self, few=few, coded=coded)

    def in_bits(self, few: FewBits, *, room: int) -> RaggedLayer:
        other = self.after(few, self._coded([0] * len(self.lengths), few, None))
        other.flush()
        other.copy_out(room=room)
        other._hold(narrowed(other.slab_TBKX, few.window_dtype(self.shape.dtype)))
        return other

    def flush(self, *, coming: int = 0) -> None:
        if self.few is None:
            return
        counts = [self.few.leaving(length + coming) for length in self.lengths]
        if not any(counts):
            return
        assert self.coded is not None
        self.coded = self.coded.grown(self._coded(counts, self.few, self.coded))
        # Their memory is freed when the windows are copied next: forks may share it.
        self.starts = [start + num for start, num in zip(self.starts, [*counts, 0], strict=True)]
        self.lengths = [length - num for length, num in zip(self.lengths, counts, strict=True)]
        self._locate()

    def _coded(self, counts: Sequence[int], few: FewBits, before: QuantisedSequences | None) -> QuantisedSequences:
        """The first exact tokens of each sequence, so many, in few bits; they come after those of `before`."""
        rows_Y = rows_of(self.starts, counts, self.slab_TBKX.device)
        return QuantisedSequences.quantise(
            self.slab_TBKX[rows_Y, 0, 0],
            self.positions_TBK[rows_Y, 0, 0],
            {policy: each_TBK[rows_Y, 0, 0] for policy, each_TBK in self.carried.items()},
            counts,
            shape=self.shape,
            bits=few.bits,
            keys_by_token=few.keys_by_token,
            before=before,
        )

    def cut_to(self, before: QuantisedSequences, slots_BKm: Tensor, *, room: int, compensates: bool) -> RaggedLayer:
        """A layer with the tokens of these slots alone. None is quantised a second time, and none is dequantised.

        Args:
            before: the tokens in few bits.
            slots_BKm, room, compensates: as of `cut_back`.
        """
        device, heads = slots_BKm.device, self.shape.num_kv_heads
        slots_BKm = slots_BKm.expand(-1, heads, -1)
        spans = before.places
        # A slot's number from the right is its token's from the end of the sequence, whose window comes last.
        ends = [end + exact for (_, end), exact in zip(spans, self.lengths, strict=True)]
        firsts_BK1, coded_BK1, ends_BK1 = (
            row_values(places, device).view(-1, heads, 1) for places in (*zip(*spans, strict=True), ends)
        )
        places_BKm = slots_BKm - self.num_slots + ends_BK1
        slots_BKm = slots_BKm.masked_fill(places_BKm < firsts_BK1, -1)
        is_coded_BKm = (slots_BKm >= 0) & (places_BKm < coded_BK1)
        # The host waits, once.
        counts, kept = torch.stack([is_coded_BKm, slots_BKm >= 0]).sum(dim=-1).flatten(1).tolist()
        exact = [num - coded for num, coded in zip(kept, counts, strict=True)]
        dropped = self.all_but(slots_BKm) if compensates else None
        window = RaggedLayer.from_slots(self, slots_BKm.masked_fill(is_coded_BKm, -1), room=room, lengths=exact)
        window.dropped = dropped
        # Of a sequence's slots those in codes come before the exact ones.
        coded_Y = rows_of(last_places(slots_BKm.shape[2], kept), counts, device)
        return window.after(self.few, before.kept(places_BKm.flatten().index_select(0, coded_Y), counts))

    def _locate(self) -> None:
        """Tell the device where the sequences are, how long they are, and where their next tokens are stored."""
        starts, used_S = (row_values(each, self.slab_TBKX.device) for each in (self.starts, self.lengths))
        self._starts, self._used_S, self._next_S = starts.int(), used_S.int(), starts[:-1] + used_S

    @property
    def stored(self) -> Sequence[int]:
        """Number of tokens of each sequence."""
        if self.coded is None:
            return self.lengths
        return [coded + exact for coded, exact in zip(self.coded.lengths, self.lengths, strict=True)]

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
        """Bytes allocated: as of `KeptLayer`, where the sequences are, and the tokens in few bits."""
        coded = 0 if self.coded is None else self.coded.num_bytes
        return super().num_bytes + self._starts.nbytes + self._used_S.nbytes + self._next_S.nbytes + coded

    def slab(self) -> KVSlab:
        raise NotImplementedError("a layer whose heads store different numbers of tokens is no slab")

    def rows_of(self, slots_BKm: Tensor) -> Tensor:
        ends_S = self._starts[:-1] + self._used_S
        return slots_BKm - self.num_slots + ends_S.view(*slots_BKm.shape[:2], 1)

    def positions_BKn(self) -> Tensor:  # noqa: N802
        coded_T = None if self.coded is None else self.coded.positions_T
        return self._padded(self.positions_TBK[:, 0, 0], coded_T, -1)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        """All tokens, dequantised, in new memory; padding is 0."""
        coded_TX = None if self.coded is None else self.coded.read(self.shape.dtype)
        return self._padded(self.slab_TBKX[:, 0, 0], coded_TX, 0)

    def carried_BKn(self, policy: Hashable) -> Tensor | None:  # noqa: N802
        if policy not in self.carried:
            return None
        coded_T = None if self.coded is None else self.coded.carried[policy]
        return self._padded(self.carried[policy][:, 0, 0], coded_T, 0)

    def _padded(self, exact_T: Tensor, coded_T: Tensor | None, padding: int) -> Tensor:
        """A copy of the values of all sequences (B, K, n, ...), padded on the left."""
        like_T = exact_T if coded_T is None else coded_T
        out_Sn = like_T.new_full((len(self.lengths), self.num_slots, *exact_T.shape[1:]), padding)
        for out_n, start, length in zip(out_Sn, self.starts, self.lengths, strict=False):
            out_n[self.num_slots - length :] = exact_T[start : start + length]
        if coded_T is not None:
            assert self.coded is not None
            for out_n, length, (first, end) in zip(out_Sn, self.lengths, self.coded.places, strict=True):
                last = self.num_slots - length
                out_n[last - (end - first) : last] = coded_T[first:end]
        return out_Sn.unflatten(0, (-1, self.shape.num_kv_heads))

    def carry(self, values_BKn: Tensor, policy: Hashable) -> None:
        values_Sn, ends = values_BKn.flatten(0, 1), [self.num_slots - length for length in self.lengths]
        carried_T = values_BKn.new_zeros(len(self.slab_TBKX))
        for values_n, start, length, end in zip(values_Sn, self.starts, self.lengths, ends, strict=False):
            carried_T[start : start + length] = values_n[end:]
        self.carried = {**self.carried, policy: carried_T[:, None, None]}
        if self.coded is not None:
            parts = zip(values_Sn, ends, self.coded.lengths, strict=True)
            self.coded = self.coded.carrying(torch.cat([each_n[end - num : end] for each_n, end, num in parts]), policy)

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
        self.memory.write(rows_Y, *self._as_stored(k_BKCH, v_BKCV))
        for each_TBK in self.carried.values():
            each_TBK[:, 0, 0].index_fill_(0, rows_Y, 0)
        self._used_S += counts_S
        self._next_S += counts_S
        self.lengths = [length + new for length, new in zip(self.lengths, new_S, strict=True)]
        self.room -= num_new
        self._count()
        if num_new == 1:  # several attend to each other first
            self.flush()

    def set_end(self, end: int) -> None:
        self._place()
        num_taken = self.first + self.num_slots - end
        self.lengths, self.room = [length - num_taken for length in self.lengths], self.room + num_taken
        assert min(self.lengths) >= 0, "a token in few bits, or dropped, is not taken back"
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
            coded=None if self.coded is None else self.coded.some(first, stop),
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
            read, q_BNCH = self._dequantised()._at_slots(self.rotary, q_BNCH)
        return SeenKV(
            q_BNCH=q_BNCH,
            steps=read.steps(q_BNCH, tokens.pads(q_BNCH.shape[2])),
            whole=read.read,
            positions=self.positions_BKn,
            num_sequences=self.shape.num_kv_heads,
            rest=None if dropped is None else lambda terms, _: dropped.attend(q_BNCH, self.shape.key_dim, terms),
        )

    def _dequantised(self) -> RaggedLayer:
        """This layer, or its tokens as they are read, if some are in few bits."""
        if self.coded is None:
            return self
        positions_BKn, slots_n = self.positions_BKn(), torch.arange(self.num_slots, device=self.slab_TBKX.device)
        slots_BKn = slots_n.expand(positions_BKn.shape).masked_fill(positions_BKn < 0, -1)
        return RaggedLayer.from_slots(self._padded_to_longest(), slots_BKn, room=0, lengths=self.stored)

    def _padded_to_longest(self) -> KeptLayer:
        """The tokens as they are read, in new memory, as slots of equal heads: others are padded on the left."""
        padded = {policy: self.carried_BKn(policy) for policy in self.carried}
        return KeptLayer(
            shape=self.shape,
            slab_TBKX=self.kv_BKnX().permute(2, 0, 1, 3).contiguous(),
            placed_TBK=self.positions_BKn().permute(2, 0, 1).contiguous(),
            carried={policy: each_BKn.permute(2, 0, 1) for policy, each_BKn in padded.items() if each_BKn is not None},
            pads=self.pads,
            alike=False,
            rotary=self.rotary,
            num_slots=self.num_slots,
        )

    def _at_slots(self, rotary: Rotary, q_BNCH: Tensor) -> tuple[RaggedLayer, Tensor]:
        """This layer with keys rotated to their places in their sequences, and the newest queries, to theirs."""
        assert self.dropped is None, "a mean has no place"
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
        num_new, shape, windows = q_BNCH.shape[2], self.shape, self
        if self.few is not None and self.slab_TBKX.dtype != q_BNCH.dtype:
            windows = copy(self)
            windows.slab_TBKX = self.slab_TBKX.to(q_BNCH.dtype)
        pads = [pad for pad in new_pads for _ in range(shape.num_kv_heads)]

        def apart() -> list[Run]:
            return [Run(windows.memory, self._spans(pads, num_new), self._biased)]

        takes = takes_sequences(q_BNCH.device, q_BNCH.dtype, shape.key_dim, shape.value_dim)
        coded = list[Step]()
        if self.coded is not None and self.coded.num_tokens:
            bias = self.coded.biased_by(shape.num_kv_heads)
            coded.append(Step([Run(self.coded, self.coded.spans_for(num_new), bias)]))
        if num_new > 1 or any(new_pads) or not takes or not self.num_slots:
            return [Step(apart()), *coded]
        lengths = Lengths(
            starts=self._starts,
            seen_S=self._used_S,
            room=max(self.lengths),
            may_be_empty=0 in self.lengths,
            places=[range(first, first + num) for first, num in zip(self.starts, self.lengths, strict=False)],
            apart=apart,
        )
        return [Step([Run(windows.memory, lengths)]), *coded]

    def _spans(self, pads: Sequence[int], num_new: int) -> list[Span]:
        """Each sequence as a row of its own. Counted in slots, which are in causal order whichever tokens they hold."""
        spans = list[Span]()
        for number, (start, length, pad) in enumerate(zip(self.starts, self.lengths, pads, strict=False)):
            slots, at = range(start, start + length), range(pad, pad + length)
            of_row = spans_of(slots, start=at.stop - num_new, num_new=num_new, pads=[pad], at=at)
            spans += [replace(span, rows=slice(number, number + 1), stored=EVERY_ROW) for span in of_row]
        return spans

    def _biased(self, key_bias: KeyBias, sequence: slice | Tensor, slots: slice) -> Tensor:
        """The bias of tokens of a sequence at their positions, as of `Run`, for the query heads of its KV head."""
        assert isinstance(sequence, slice), "sequences are told apart"
        heads = self.shape.num_kv_heads
        return key_bias(self.positions_TBK[slots, 0, 0]).unflatten(0, (heads, -1))[sequence.start % heads][None]

    def keep(self, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int] | None = None) -> KeptLayer:
        """Copy as many slots of every head to a layer whose heads store equally many; some may be padding."""
        assert tokens_B is not None and self.coded is None, "cut_back counts the tokens, and cuts codes"
        is_padding_BKm = self.positions_BKn().take_along_dim(slots_BKm.clamp_min(0), dim=2) < 0
        slots_BKm = slots_BKm.masked_fill(is_padding_BKm, -1)
        return self._padded_to_longest().keep(slots_BKm, room=room, tokens_B=tokens_B)

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
