"""A layer in 8, 4 or 2 bits whose KV heads store different numbers of tokens.

Each row and KV head is a sequence that is quantised by itself, as a row of a dense layer: its first tokens in groups,
its newest ones exact. The exact ones are a `RaggedLayer`, the others are `QuantisedSequences`.
"""

# Legend: B batch, K kv heads, S = B * K sequences, C new tokens, n tokens of the longest sequence, m kept ones,
# T rows of memory, Y some of them, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.op import Run, Step
from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.groups import GROUP, Groups, TokenGroups, narrowed
from runahead.cache.quantised.layer import QuantisedLayer, code_bytes, dtype_of_window
from runahead.cache.quantised.sequences import QuantisedSequences
from runahead.cache.slabs import KVShape
from runahead.thinning.ragged import DroppedTokens, RaggedLayer, last_places, rows_of


@dataclass(kw_only=True)
class QuantisedRagged(RaggedLayer):
    """One layer, of which each sequence has quantised tokens, and after them a window of its newest ones.

    Attributes:
        slab_TBKX, positions_TBK, carried, lengths, starts, room: of the tokens in the windows.
        coded: all tokens before these.
        bits: of a code.
        residual: a sequence has at least so many tokens in its window, if it has so many and none is dropped later.
    """

    coded: QuantisedSequences
    bits: int
    residual: int

    @classmethod
    def of_exact(
        cls, layer: RaggedLayer, *, bits: int, residual: int, residual_bits: int | None, keys_by_token: bool, room: int
    ) -> QuantisedRagged:
        """Quantise a layer. Its memory is only read. The arguments are those of `QuantisedLayer.of`."""
        coded = _coded(layer, [0] * len(layer.lengths), bits=bits, keys_by_token=keys_by_token)
        made = cls._over(layer, coded, bits=bits, residual=residual)
        made.flush()
        made.copy_out(room=room)
        made._hold(narrowed(made.slab_TBKX, dtype_of_window(layer.shape, residual_bits)))
        return made

    @classmethod
    def of_dense(cls, layer: QuantisedLayer) -> QuantisedRagged:
        """The same tokens, of which no padding is stored. The codes stay as they are."""
        heads, num_slots, width = layer.shape.num_kv_heads, layer.num_slots, layer.positions_TBK.shape[2]
        window = KeptLayer(
            shape=layer.shape,
            slab_TBKX=layer.slab_TBKX[: num_slots - layer.start],
            placed_TBK=layer.positions_TBK[layer.start : num_slots],
            pads=[],
            num_slots=num_slots - layer.start,
            carried={policy: each_TBK[layer.start : num_slots] for policy, each_TBK in layer.carried.items()},
        )
        batch = len(layer.pads)
        by_row = {row: part for part in layer.parts for row in range(batch)[part.rows]}
        slots_n = torch.arange(window.num_slots, device=layer.slab_TBKX.device)
        ends_B11 = row_values([by_row[row].end - layer.start for row in range(batch)], slots_n.device)[:, None, None]
        slots_BKn = slots_n.where(slots_n >= ends_B11, -1).expand(-1, heads, -1)

        def flat(values_TBK: Tensor) -> Tensor:
            values = [values_TBK[part.pad : part.end, part.rows].expand(-1, -1, heads) for part in layer.parts]
            return torch.cat([each.permute(1, 2, 0).flatten() for each in values])

        assert width in (1, heads)
        scales = [part.scales.by_head() for part in layer.parts if part.scales is not None]
        coded = QuantisedSequences.holding(
            Groups.joined([part.keys.in_line() for part in layer.parts]),
            TokenGroups.joined([part.values.in_line() for part in layer.parts]),
            flat(layer.positions_TBK),
            {policy: flat(each_TBK) for policy, each_TBK in layer.carried.items()},
            [by_row[row].num_tokens for row in range(batch) for _ in range(heads)],
            ChannelScales.joined(scales) if scales else None,
        )
        exact = RaggedLayer.of(window, slots_BKn, room=0)
        return cls._over(exact, coded, bits=layer.bits, residual=layer.residual)

    @classmethod
    def _over(cls, window: RaggedLayer, coded: QuantisedSequences, *, bits: int, residual: int) -> QuantisedRagged:
        return cls(**window.fields_of(RaggedLayer), coded=coded, bits=bits, residual=residual)

    @property
    def in_few_bits(self) -> bool:
        return True

    @property
    def stored(self) -> Sequence[int]:
        return [coded + exact for coded, exact in zip(self.coded.lengths, self.lengths, strict=True)]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.coded.num_bytes

    def flush(self) -> None:
        """Quantise the whole groups of tokens before the last `residual` ones of each sequence."""
        counts = [max(0, length - self.residual) // GROUP * GROUP for length in self.lengths]
        if not any(counts):
            return
        by_token = self.coded.scales is not None
        new = _coded(self, counts, bits=self.bits, keys_by_token=by_token, before=self.coded)
        self.coded = self.coded.grown(new)
        # Their memory is freed when the windows are copied next: forks may share it.
        self.starts = [start + num for start, num in zip(self.starts, [*counts, 0], strict=True)]
        self.lengths = [length - num for length, num in zip(self.lengths, counts, strict=True)]
        self._locate()

    def cut_to(self, slots_BKm: Tensor, *, room: int, compensates: bool) -> QuantisedRagged:
        """A layer with the tokens of these slots alone. None is quantised a second time, and none is dequantised.

        The arguments are those of `cut_back`; padding is left out.
        """
        device, heads = slots_BKm.device, self.shape.num_kv_heads
        slots_BKm = slots_BKm.expand(-1, heads, -1)
        spans = self.coded.places
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
        dropped = DroppedTokens.of(self, slots_BKm) if compensates else None
        window = RaggedLayer.of(self, slots_BKm.masked_fill(is_coded_BKm, -1), room=room, lengths=exact)
        window.dropped = dropped
        # Of a sequence's slots those in codes come before the exact ones.
        coded_Y = rows_of(last_places(slots_BKm.shape[2], kept), counts, device)
        coded = self.coded.kept(places_BKm.flatten().index_select(0, coded_Y), counts)
        return self._over(window, coded, bits=self.bits, residual=self.residual)

    def positions_BKn(self) -> Tensor:  # noqa: N802
        return self._whole(self.coded.positions_T, self.positions_TBK[:, 0, 0], -1)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        """All tokens, dequantised, in new memory; padding is 0."""
        dtype = self.shape.dtype
        return self._whole(self.coded.read(dtype), self.slab_TBKX[:, 0, 0].to(dtype), 0)

    def carried_BKn(self, policy: Hashable) -> Tensor | None:  # noqa: N802
        if policy not in self.carried:
            return None
        return self._whole(self.coded.carried[policy], self.carried[policy][:, 0, 0], 0)

    def carry(self, values_BKn: Tensor, policy: Hashable) -> None:
        super().carry(values_BKn, policy)
        ends = [self.num_slots - length for length in self.lengths]
        of_coded = [
            values_n[end - num : end]
            for values_n, end, num in zip(values_BKn.flatten(0, 1), ends, self.coded.lengths, strict=True)
        ]
        self.coded = self.coded.carrying(torch.cat(of_coded), policy)

    def _whole(self, coded_T: Tensor, exact_T: Tensor, padding: int) -> Tensor:
        """The values of all tokens (B, K, n, ...), padded on the left."""
        out_BKn = self._padded(exact_T, padding)
        for out_n, length, (first, end) in zip(out_BKn.flatten(0, 1), self.lengths, self.coded.places, strict=True):
            last = self.num_slots - length
            out_n[last - (end - first) : last] = coded_T[first:end]
        return out_BKn

    def store(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        k_BKCH, v_BKCV = (narrowed(x, self.slab_TBKX.dtype) for x in (k_BKCH, v_BKCV))
        super().store(k_BKCH, v_BKCV, positions_BC, new_pads)
        if k_BKCH.shape[2] == 1:  # several attend to each other first
            self.flush()

    def steps(self, q_BNCH: Tensor, new_pads: Sequence[int]) -> list[Step]:
        windows = self
        if self.slab_TBKX.dtype != q_BNCH.dtype:
            windows = copy(self)
            windows.slab_TBKX = self.slab_TBKX.to(q_BNCH.dtype)
        steps = RaggedLayer.steps(windows, q_BNCH, new_pads)
        if self.coded.num_tokens:
            bias = self.coded.biased_by(self.shape.num_kv_heads)
            steps.append(Step([Run(self.coded, self.coded.spans_for(q_BNCH.shape[2]), bias)]))
        return steps


def _coded(
    layer: RaggedLayer,
    counts: Sequence[int],
    *,
    bits: int,
    keys_by_token: bool,
    before: QuantisedSequences | None = None,
) -> QuantisedSequences:
    """The first tokens of each sequence, so many, in few bits; they come after those of `before`."""
    rows_Y = rows_of(layer.starts, counts, layer.slab_TBKX.device)
    return QuantisedSequences.of(
        layer.slab_TBKX[rows_Y, 0, 0],
        layer.positions_TBK[rows_Y, 0, 0],
        {policy: each_TBK[rows_Y, 0, 0] for policy, each_TBK in layer.carried.items()},
        counts,
        shape=layer.shape,
        bits=bits,
        keys_by_token=keys_by_token,
        before=before,
    )


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
    exact = (shape.key_dim + shape.value_dim) * dtype_of_window(shape, residual_bits).itemsize
    total = torch.int32.itemsize * (3 * len(lengths) + 2) + torch.int64.itemsize * len(lengths)
    if compensates:
        wide = torch.promote_types(shape.dtype, torch.float32).itemsize
        total += len(lengths) * (shape.key_dim + shape.value_dim + 1) * wide
    for length in lengths:
        num_coded = max(0, (length - residual) // GROUP * GROUP)
        total += code_bytes(shape, num_coded, bits, keys_by_token=keys_by_token)
        total += (length - num_coded + room) * exact + (length + room) * torch.int32.itemsize
    return total
