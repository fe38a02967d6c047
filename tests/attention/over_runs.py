"""Attention to the runs of a text, as the runtime computes it today: the one place that knows its functions.

A run is a rectangle: some tokens of some KV heads, which some rows read, in one codec. Whatever stores keys and values
consists of such rectangles, so whoever changes how they are stored or attended to changes this file, and the contract
in test_over_runs.py stays.
"""

# Legend: B batch, N query heads, K kv heads of a run, n its query heads, C new tokens, Q queries of some rows, T tokens
# of a run, H key dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from runahead.attention.op import EVERY_ROW, Part, Run, Span, Step, finish, joined
from runahead.attention.op import attend as attend_to_steps
from runahead.attention.partial import AttentionTerms, attend, attend_at, merge
from runahead.cache.quantised.groups import GROUP, ChannelGroups, blocks
from runahead.cache.quantised.rows import QuantisedRows
from runahead.cache.slabs import KVSlab


@dataclass(frozen=True)
class Codec:
    """Keys and values in few bits; keys in groups of 32 tokens of a channel, or of 32 channels of a token."""

    bits: int
    by_token: bool

    @property
    def unit(self) -> int:
        """Tokens that are stored together."""
        return 1 if self.by_token else GROUP


@dataclass(frozen=True, eq=False)
class TextRun:
    """Tokens of some KV heads.

    Attributes:
        rows: rows of the batch that read them.
        heads: the KV heads.
        kv_TKX: their keys and values, before they are stored.
        key_dim: H.
        positions_T: ascending.
        codec: None stores the numbers as they are.
        num_own: the last tokens, which are the new ones of the only row; all others come before the new ones.
    """

    rows: tuple[int, ...]
    heads: range
    kv_TKX: Tensor
    key_dim: int
    positions_T: Tensor
    codec: Codec | None = None
    num_own: int = 0

    @cached_property
    def _few_bits(self) -> QuantisedRows | None:
        if self.codec is None:
            return None
        k, v = (x.permute(1, 0, 2)[None] for x in self.kv_TKX.split([self.key_dim, self._value_dim], dim=2))
        none = k[:, :, :0], v[:, :, :0]
        empty = QuantisedRows.empty(*none, self.codec.bits, rows=slice(0, 1), pad=0, by_token=self.codec.by_token)
        return empty.grown(k, v) if len(self.kv_TKX) else empty

    @property
    def _value_dim(self) -> int:
        return self.kv_TKX.shape[2] - self.key_dim

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (1, K, T, H) and values (1, K, T, V) of some of the tokens, as they are stored."""
        if self._few_bits is None:
            kv_1KTX = self.kv_TKX[first:end].permute(1, 0, 2)[None]
            return kv_1KTX[..., : self.key_dim], kv_1KTX[..., self.key_dim :]
        dtype = self.kv_TKX.dtype
        return self._few_bits.read_keys(first, end, dtype), self._few_bits.values.read(first, end, dtype)

    def attended_by(self, q_BnCH: Tensor, terms: AttentionTerms, positions: Sequence[Tensor]) -> Part:
        """Attention of the new tokens of all rows to these tokens, by this run's query heads."""
        num_new = q_BnCH.shape[2]
        if self.is_exact:
            return attend_to_steps(q_BnCH, [self.step(positions, num_new)], terms)
        found = [
            self._attended_in_few_bits(q_BnCH[row : row + 1, :, queries.start :], terms, positions[row])
            for row, queries in self._places(positions, num_new)
        ]
        held = [(slice(row, row + 1), queries) for row, queries in self._places(positions, num_new)]
        return joined(q_BnCH, self._value_dim, held, found)

    @property
    def is_exact(self) -> bool:
        """Whether the numbers are stored as they are."""
        return self._few_bits is None

    def step(self, positions: Sequence[Tensor], num_new: int) -> Step:
        """The tokens in memory of their own, which the rows read together if they have as many new tokens."""
        slab = KVSlab(slab_TBKX=self.kv_TKX[:, None], key_dim=self.key_dim, first=0)
        places = self._places(positions, num_new)
        spans = [self._span(row, queries, positions[row]) for row, queries in places]
        if len({span.queries for span in spans}) == 1 and len(spans) > 1:
            rows, apart = torch.tensor([row for row, _ in places]), list(spans)
            spans = [replace(spans[0], rows=rows, apart=lambda: apart)]
        return Step([Run(slab, spans)])

    def _places(self, positions: Sequence[Tensor], num_new: int) -> list[tuple[int, range]]:
        """Rows that read the run, and numbers of their new tokens."""
        return [(row, range(num_new - len(positions[row]), num_new)) for row in self.rows if len(positions[row])]

    def _span(self, row: int, queries: range, positions_Q: Tensor) -> Span:
        slots = range(len(self.positions_T))
        return Span(
            rows=slice(row, row + 1),
            stored=EVERY_ROW,
            pad=0,
            slots=slots,
            at=self.positions_T.tolist(),
            at_T=None if not slots or _in_line(self.positions_T) else self.positions_T,
            queries=queries,
            positions=positions_Q.tolist(),
            positions_Q=None if _in_line(positions_Q) else positions_Q,
            has_new=self.num_own > 0,
        )

    def _attended_in_few_bits(self, q_1nQH: Tensor, terms: AttentionTerms, positions_Q: Tensor) -> Part:
        """Attention of the new tokens of a row: first to themselves, if there are several, then to all before."""
        codes, total, num_own = self._few_bits, len(self.positions_T), self.num_own if self.num_own > 1 else 0
        assert codes is not None
        before = total - num_own
        in_order = _in_order(terms) and not terms.needs_scores
        if isinstance(codes.keys, ChannelGroups) and in_order and len(positions_Q) == 1 and total:
            return codes.attend_one(q_1nQH, terms.scaling)
        ranges = [(before, total, True)] if num_own else []
        ranges += [(*block, False) for block in blocks(before)]
        parts = [
            _part(q_1nQH, *self.read(start, end), terms, positions_Q, self.positions_T[start:end], is_own)
            for start, end, is_own in ranges
        ]
        return reduce(lambda found, part: merge(*found, *part), parts)


def attend_to_runs(
    q_BNCH: Tensor,
    runs: Sequence[TextRun],
    terms: AttentionTerms,
    positions: Sequence[Tensor],
    *,
    heads: int,
    value_dim: int,
) -> Part:
    """Attention of the new tokens of a left-padded batch to all runs, with the family's sinks.

    Args:
        positions: of each row's new tokens, which are the last ones of C.
        heads: number of KV heads.
    """
    group = q_BNCH.shape[1] // heads
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    found = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim), q_BNCH.new_full(q_BNCH.shape[:3], -torch.inf, dtype=wide)
    whole = [run for run in runs if run.is_exact and len(run.heads) == heads]
    if whole:
        found = attend_to_steps(q_BNCH, [run.step(positions, q_BNCH.shape[2]) for run in whole], terms)
    for run in (run for run in runs if run not in whole):
        of_run = slice(run.heads.start * group, run.heads.stop * group)
        out, lse = (torch.zeros_like(found[0]), torch.full_like(found[1], -torch.inf))
        out[:, of_run], lse[:, of_run] = run.attended_by(q_BNCH[:, of_run], _of_heads(terms, of_run), positions)
        found = merge(*found, out, lse)
    return finish(found, terms, q_BNCH.dtype), found[1]


def _in_order(terms: AttentionTerms) -> bool:
    """Whether only the order of tokens counts, not where they are."""
    return terms.rule is None and terms.key_bias is None


def _of_heads(terms: AttentionTerms, heads: slice) -> AttentionTerms:
    bias = terms.key_bias
    return terms if bias is None else replace(terms, key_bias=lambda keys_S: bias(keys_S)[heads])


def _part(
    q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms, positions_Q: Tensor, positions_T: Tensor, is_own: bool
) -> Part:
    if _in_order(terms):
        return attend(q, k, v, terms, q_start=0 if is_own else k.shape[2], k_start=0)
    if len(positions_T) and _in_line(positions_Q) and _in_line(positions_T):
        return attend(q, k, v, terms, q_start=int(positions_Q[0]), k_start=int(positions_T[0]))
    return attend_at(q, k, v, terms, positions_Q, positions_T)


def _in_line(positions: Tensor) -> bool:
    return len(positions) == int(positions[-1] - positions[0]) + 1
