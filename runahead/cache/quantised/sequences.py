"""Quantised tokens of a layer whose rows and KV heads store different numbers of them.

The tokens of a row and KV head are a sequence of their own. All sequences lie one after another in flat memory, as if
they were one KV head of one row. Keys in groups of 32 tokens make pages of 32, each of one sequence: attention of a
generated token treats pages as rows, and sums what it finds over the pages of each sequence. So a head with few tokens
costs little, and no operation is repeated for each head. Several new tokens, and keys in groups of one token, are
dequantised head by head, a block at a time.
"""

# Legend: S sequences (rows x KV heads), G query heads of a KV head, C new tokens, T stored tokens, Y some of them,
# g pages, t = 32 tokens of a page, H key dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policies.row_values import row_values
from runahead.attention.op import EVERY_ROW, Codec, Part, Span, spans_of
from runahead.attention.partial import AttentionTerms, KeyBias
from runahead.cache.quantised.channel_scales import ChannelScales
from runahead.cache.quantised.groups import GROUP, ChannelGroups, Groups, TokenGroups, blocks
from runahead.cache.quantised.rows import QuantisedRows
from runahead.cache.slabs import KVShape


@dataclass(frozen=True, kw_only=True)
class QuantisedSequences(Codec):
    """The quantised tokens of all sequences. It is never changed in place, so that copies of a cache share it.

    Attributes:
        keys, values: of all tokens, as those of one KV head of one row.
        positions_T: position of each token in its row.
        carried: a value (T) that a policy accumulates for each token, by `Policy.state_key`.
        lengths: number of tokens of each sequence; multiples of 32 if keys are grouped by channel.
        scales: of the keys' channels, with a sequence as a row, if keys are grouped by token.
    """

    keys: Groups
    values: TokenGroups
    positions_T: Tensor
    carried: Mapping[Hashable, Tensor]
    lengths: Sequence[int]
    scales: ChannelScales | None = None

    @classmethod
    def quantise(
        cls,
        kv_YX: Tensor,
        positions_Y: Tensor,
        carried: Mapping[Hashable, Tensor],
        lengths: Sequence[int],
        *,
        shape: KVShape,
        bits: int,
        keys_by_token: bool,
        before: QuantisedSequences | None = None,
    ) -> QuantisedSequences:
        """Quantise tokens, which lie sequence by sequence, and come after the tokens of `before`."""
        k_YH, v_YV = kv_YX.to(shape.dtype).split([shape.key_dim, shape.value_dim], dim=1)
        values = TokenGroups.quantise(v_YV[None, None], bits, sequences=len(lengths))
        keys: Groups
        if keys_by_token:
            parts = k_YH[None, None].split(list(lengths), dim=2)
            scales = [ChannelScales.from_keys(k_11SH) for k_11SH in parts]
            if before is not None and before.scales is not None:
                scales = [before.scales.row(row) if num else scales[row] for row, num in enumerate(before.lengths)]
            keys = TokenGroups.joined([each.groups(k_11SH, bits) for each, k_11SH in zip(scales, parts, strict=True)])
        else:
            scales, keys = [], ChannelGroups.quantise(k_YH[None, None], bits, sequences=len(lengths))
        return cls(
            keys=keys,
            values=values,
            positions_T=positions_Y,
            carried=carried,
            lengths=lengths,
            scales=ChannelScales.joined(scales) if scales else None,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions_T)

    @cached_property
    def page_starts(self) -> Tensor:
        """First page of each sequence, and the end of the last (S + 1), on the device, of keys grouped by channel."""
        assert isinstance(self.keys, ChannelGroups), "only these have pages"
        num_pages = [length // GROUP for length in self.lengths]
        return row_values(list(accumulate(num_pages, initial=0)), self.positions_T.device).int()

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, positions, what policies accumulate, and of where the pages are."""
        carried = sum(each_T.nbytes for each_T in self.carried.values())
        codes = self.keys.num_bytes + self.values.num_bytes + (0 if self.scales is None else self.scales.num_bytes)
        starts = self.page_starts.nbytes if isinstance(self.keys, ChannelGroups) else 0
        return codes + self.positions_T.nbytes + carried + starts

    @property
    def places(self) -> list[tuple[int, int]]:
        """The tokens [first, end) of each sequence in memory."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    def grown(self, new: QuantisedSequences) -> QuantisedSequences:
        """With the tokens of `new`, which were quantised as those after these, after those of each sequence."""
        pairs = zip(self.places, new.places, strict=True)
        parts = [(each, *span) for pair in pairs for each, span in zip((self, new), pair, strict=True)]
        parts = [(each, first, end) for each, first, end in parts if first < end]
        return QuantisedSequences(
            keys=Groups.joined([each.keys.part(first, end) for each, first, end in parts]),
            values=TokenGroups.joined([each.values.part(first, end) for each, first, end in parts]),
            positions_T=torch.cat([each.positions_T[first:end] for each, first, end in parts]),
            carried={
                policy: torch.cat([each.carried[policy][first:end] for each, first, end in parts])
                for policy in new.carried
            },
            lengths=[sum(each) for each in zip(self.lengths, new.lengths, strict=True)],
            scales=new.scales,
        )

    def kept(self, index_Y: Tensor, lengths: Sequence[int]) -> QuantisedSequences:
        """Some tokens, by their places in memory, in order; the codes stay as they are."""
        assert isinstance(self.keys, TokenGroups), "a group of several tokens cannot lose one of them"
        return replace(
            self,
            keys=self.keys.take(index_Y[None, None]),
            values=self.values.take(index_Y[None, None]),
            positions_T=self.positions_T[index_Y],
            carried={policy: each_T[index_Y] for policy, each_T in self.carried.items()},
            lengths=lengths,
        )

    def some(self, first: int, stop: int) -> QuantisedSequences:
        """The sequences [first, stop)."""
        begin, end = sum(self.lengths[:first]), sum(self.lengths[:stop])
        return QuantisedSequences(
            keys=self.keys.part(begin, end),
            values=self.values.part(begin, end),
            positions_T=self.positions_T[begin:end],
            carried={policy: each_T[begin:end] for policy, each_T in self.carried.items()},
            lengths=self.lengths[first:stop],
            scales=None if self.scales is None else self.scales.rows(first, stop),
        )

    def carrying(self, carried_T: Tensor, policy: Hashable) -> QuantisedSequences:
        """With a policy's value of each token."""
        return replace(self, carried={**self.carried, policy: carried_T})

    def sequence(self, number: int) -> QuantisedRows:
        """One sequence, as one KV head of one row; views."""
        first, end = self.places[number]
        keys, values = self.keys.part(first, end), self.values.part(first, end)
        scales = None if self.scales is None else self.scales.row(number)
        return QuantisedRows(rows=EVERY_ROW, pad=0, keys=keys, values=values, scales=scales)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Keys and values (T, X) of all tokens, dequantised."""
        if self.scales is None:
            keys_11TH = self.keys.read(0, self.num_tokens, dtype)
        else:
            parts = [self.sequence(number).read_keys(0, num, dtype) for number, num in enumerate(self.lengths)]
            keys_11TH = torch.cat(parts, dim=2)
        return torch.cat([x[0, 0] for x in (keys_11TH, self.values.read(0, self.num_tokens, dtype))], dim=1)

    @property
    def value_dim(self) -> int:
        return self.values.dim

    def spans_for(self, num_new: int) -> list[Span]:
        """All tokens of all sequences as seen by new tokens, which come after them."""
        longest = max(self.lengths)
        return spans_of(range(longest), start=longest, num_new=num_new, pads=[0], has_new=False)

    def biased_by(self, num_kv_heads: int) -> Callable[[KeyBias, slice | Tensor, slice], Tensor]:
        """The bias of all tokens at their positions, as of `Run`, with each sequence as a row of its query heads."""

        def bias(key_bias: KeyBias, rows: slice | Tensor, slots: slice) -> Tensor:
            positions = [self.positions_T[first:end] for first, end in self.places]
            positions_Sn = pad_sequence(positions, batch_first=True)[:, slots]
            bias_SKGn = key_bias(positions_Sn[:, None]).unflatten(1, (num_kv_heads, -1))
            sequences_S = torch.arange(len(positions), device=positions_Sn.device)
            return bias_SKGn[sequences_S, sequences_S % num_kv_heads]

        return bias

    def attend(
        self, q_SGCH: Tensor, start: int, end: int, terms: AttentionTerms, *, q_start: int, k_start: int
    ) -> Part:
        """Attention of new tokens to all tokens of their sequence, which are all before them.

        Returns:
            output (S, G, C, V) and log-sum-exp (S, G, C); 0 and -inf of an empty sequence.
        """
        assert start == 0 and end == max(self.lengths), (start, end)
        if q_SGCH.shape[2] == 1 and terms.key_bias is None and isinstance(self.keys, ChannelGroups):
            out_SGV, lse_SG = self._attend_one(self.keys, q_SGCH[:, :, 0], terms)
            return out_SGV.unsqueeze(2), lse_SG.unsqueeze(2)
        parts, bias = list[Part](), terms.key_bias
        for number, (q_1GCH, num) in enumerate(zip(q_SGCH.split(1), self.lengths, strict=True)):
            if bias is not None:
                terms = replace(terms, key_bias=partial(_of_row, bias, number))
            parts.append(self.sequence(number).attend(q_1GCH, 0, num, terms, q_start=num, k_start=0))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _attend_one(self, keys: ChannelGroups, q_SGH: Tensor, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
        """Output (S, G, V) and log-sum-exp (S, G) of one query per head. Codes are multiplied as they are."""
        wide = torch.promote_types(q_SGH.dtype, torch.float32)
        q_SGH, num_pages = q_SGH.to(wide) * terms.scaling, self.num_tokens // GROUP
        sequences_S = torch.arange(len(self.lengths), device=q_SGH.device)
        owners_g = sequences_S.repeat_interleave(self.page_starts.diff(), output_size=num_pages)
        ranges = [(first // GROUP, end // GROUP) for first, end in blocks(self.num_tokens, len(self.lengths))]
        scores = [
            keys.pages(first, end).dot(q_SGH[owners_g[first:end]].unsqueeze(1), 0, GROUP) for first, end in ranges
        ]
        scores_gGt = torch.cat(scores).squeeze(1)
        if terms.softcap is not None:
            scores_gGt = terms.softcap * torch.tanh(scores_gGt / terms.softcap)
        lse_SG = self._logsumexp(scores_gGt.logsumexp(dim=2), owners_g)
        weights_gGt = torch.exp(scores_gGt - lse_SG[owners_g].unsqueeze(2))
        out_SGV = q_SGH.new_zeros(*lse_SG.shape, self.values.dim)
        for first, end in ranges:
            weights_g1Gt = weights_gGt[first:end].unsqueeze(1)
            out_SGV += self._summed(self.values.pages(first, end).weighted(weights_g1Gt, 0, GROUP).squeeze(1), first)
        return out_SGV, lse_SG

    def _logsumexp(self, x_gG: Tensor, owners_g: Tensor) -> Tensor:
        """Log-sum-exp (S, G) over the pages of each sequence; minus infinity of none."""
        most_SG = torch.segment_reduce(x_gG, "max", offsets=self.page_starts, axis=0, unsafe=True)
        return self._summed(torch.exp(x_gG - most_SG[owners_g])).log_() + most_SG

    def _summed(self, x: Tensor, first: int = 0) -> Tensor:
        """Sums over the pages of each sequence, of pages from `first` on; in a fixed order, so that runs repeat."""
        offsets = (self.page_starts - first).clamp(0, len(x))
        return torch.segment_reduce(x, "sum", offsets=offsets, axis=0, unsafe=True)


def _of_row(key_bias: KeyBias, row: int, keys_S: Tensor) -> Tensor:
    """The bias (N, S) of one row."""
    return key_bias(keys_S)[row]
