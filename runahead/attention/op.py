"""Attention of new tokens to stored ones: spans say which tokens lie where, and parts of the attention merge exactly.

The order is the same on all ranks and for all stores: the queries' own chunk first, which needs nothing of other ranks,
then what was stored before, which may still arrive. It depends on shapes alone, never on what has arrived, so runs
repeat bit by bit. A single query takes one call for both.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, R rows, Q queries, S keys, H head dim, V value dim.

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms, attend_at, attend_sequences, merge
from runahead.attention.partial import attend as attend_range

Part: TypeAlias = tuple[Tensor, Tensor]
"""Output (B, N, C, V) and log-sum-exp (B, N, C) of attention to some keys; 0 and -inf of a query that sees none."""

EVERY_ROW = slice(None)


class KVReader(Protocol):
    """Stored keys and values of one layer."""

    @property
    def value_dim(self) -> int: ...

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) in the slots [start, end)."""

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """Keys (T, U, H) and values (T, U, V) of all slots, U = B K."""


def nothing() -> None:
    """The `await_prefix` of a prefix that is stored already; returns at once."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Stored tokens of some rows, equally many of each row, in the order of their positions.

    Attributes:
        rows: rows of the batch.
        pad: left padding of these rows.
        slots: numbers under which their memory is read.
        at: index in the padded batch of the token in each slot; its position is `at` - `pad`. A slot has its own number
            where tokens are contiguous, or where some were dropped and only the order of those that are left counts.
        at_T: the same on the device that computes, where tokens between these lie elsewhere.
        start: index of the first of the new tokens, whose queries these are.
        num_new: number of new tokens, of which some may be padding.
        has_new: whether the last slots hold the new tokens; else all slots are before them.
    """

    rows: slice
    pad: int
    slots: range
    at: Sequence[int]
    start: int
    num_new: int
    has_new: bool
    at_T: Tensor | None = None

    @property
    def query(self) -> int:
        """Position of the first query."""
        return max(0, self.start - self.pad)

    @property
    def num_queries(self) -> int:
        """Number of new tokens that are no padding."""
        return self.start + self.num_new - self.pad - self.query


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Sequences of stored tokens of which the device knows how many there are; they see one new token each.

    Attributes:
        starts: slot of each sequence's first token, and the end of the last (S + 1, int32).
        seen_S: tokens that the new token sees, with itself (int32).
        room: most tokens of a sequence.
        may_be_empty: a sequence may have no token that the new one sees.
    """

    starts: Tensor
    seen_S: Tensor
    room: int
    may_be_empty: bool = False


def rows_by_pad(pads: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows and their left padding: all rows at once if none is padded, else one by one.

    So no mask is needed, and nothing is computed for padding.
    """
    return [(slice(r, r + 1), pad) for r, pad in enumerate(pads)] if any(pads) else [(EVERY_ROW, 0)]


def spans_of(
    slots: range,
    *,
    start: int,
    num_new: int,
    pads: Sequence[int],
    at: Sequence[int] | None = None,
    at_T: Tensor | None = None,
    has_new: bool = True,
) -> list[Span]:
    """Spans of a left-padded batch in these slots; rows whose new tokens are all padding are in none of them.

    Args:
        at, at_T: as of `Span`; by default the numbers of the slots.
    """
    return [
        Span(
            rows=rows,
            pad=pad,
            slots=slots,
            at=slots if at is None else at,
            at_T=at_T,
            start=start,
            num_new=num_new,
            has_new=has_new,
        )
        for rows, pad in rows_by_pad(pads)
        if start + num_new > pad
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    """One call: the queries of a span and its keys [first, end), by number within the span."""

    span: Span
    first: int
    end: int


def _cells(span: Span, rule: MaskRule | None) -> tuple[_Cell | None, _Cell | None]:
    """The own chunk of several queries, and what they see of earlier tokens; of one query all that it sees."""
    before, own = len(span.slots), None
    if span.has_new and span.num_queries > 1:
        before -= span.num_queries
        own = _Cell(span=span, first=before, end=len(span.slots))
    first_key = 0 if rule is None else rule.first_key(span.query)
    first = bisect_left(span.at, first_key + span.pad, hi=before)
    earlier = _Cell(span=span, first=first, end=before) if first < before else None
    return own, earlier


def attend(
    q_BNCH: Tensor,
    keys: KVReader,
    spans: Sequence[Span] | Lengths,
    terms: AttentionTerms,
    *,
    await_prefix: Callable[[], None] = nothing,
) -> Part:
    """Attention of the new tokens of a batch to stored ones, merged in at least float32, without sinks.

    Args:
        keys: of all rows; tokens before the new ones are read only after `await_prefix` has returned.

    Returns:
        output in the queries' dtype if it is of one part, else in that of the log-sum-exp; see `finish`.
    """
    if isinstance(spans, Lengths):
        return _attend_lengths(q_BNCH, keys, spans, terms)
    cells = [_cells(span, terms.rule) for span in spans]
    found = _together(q_BNCH, keys, terms, [own for own, _ in cells if own is not None])
    await_prefix()
    earlier = _together(q_BNCH, keys, terms, [cell for _, cell in cells if cell is not None])
    if found is None or earlier is None:
        return found or earlier or _no_part(q_BNCH, keys.value_dim)
    return merge(*found, *earlier)


def _attend_lengths(q_BN1H: Tensor, keys: KVReader, lengths: Lengths, terms: AttentionTerms) -> Part:
    """Attention of one query per sequence; rows without padding are one sequence with the heads of all of them."""
    out_SNV, lse_SN = attend_sequences(
        q_BN1H.reshape(len(lengths.seen_S), -1, q_BN1H.shape[3]),
        *keys.sequences,
        starts=lengths.starts,
        used_S=lengths.seen_S,
        longest=lengths.room,
        scaling=terms.scaling,
        may_be_empty=lengths.may_be_empty,
    )
    return out_SNV.reshape(*q_BN1H.shape[:3], -1), lse_SN.reshape(q_BN1H.shape[:3])


def finish(part: Part, terms: AttentionTerms, dtype: torch.dtype) -> Tensor:
    """Output (B, N, C, V): with the family's sinks, then rounded to the model's dtype."""
    out, lse = part
    if terms.sinks_N is not None:  # exp(sink) is added to the softmax's denominator
        out = out * torch.sigmoid(lse - terms.sinks_N.to(lse.dtype)[None, :, None]).unsqueeze(-1)
    return out if out.dtype == dtype else out.to(dtype)


def _together(q_BNCH: Tensor, keys: KVReader, terms: AttentionTerms, cells: Sequence[_Cell]) -> Part | None:
    """The part of cells of different rows; None if there are none. One cell of all queries is its kernel's result."""
    parts = [_attend_cell(q_BNCH, keys, terms, cell) for cell in cells]
    return joined(q_BNCH, keys.value_dim, [cell.span.rows for cell in cells], parts) if parts else None


def joined(q_BNCH: Tensor, value_dim: int, rows: Sequence[slice], parts: Sequence[Part]) -> Part:
    """The part of a batch from those of groups of rows; 0 and -inf on padding.

    Args:
        rows: of each group; those in no group are all padding.
        parts: of each group's last tokens.
    """
    if len(parts) == 1 and parts[0][0].shape[:3] == q_BNCH.shape[:3]:
        return parts[0]
    if len(parts) == len(q_BNCH) and all(out.shape[2] == q_BNCH.shape[2] for out, _ in parts):  # as in decoding
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    out_BNCV, lse_BNC = _no_part(q_BNCH, value_dim, [out.dtype for out, _ in parts])
    for group, (out, lse) in zip(rows, parts, strict=True):
        out_BNCV[group, :, -out.shape[2] :] = out
        lse_BNC[group, :, -out.shape[2] :] = lse
    return out_BNCV, lse_BNC


def _no_part(q_BNCH: Tensor, value_dim: int, dtypes: Sequence[torch.dtype] = ()) -> Part:
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    dtype = reduce(torch.promote_types, dtypes, q_BNCH.dtype)
    out_BNCV = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim, dtype=dtype)
    return out_BNCV, q_BNCH.new_full(q_BNCH.shape[:3], -math.inf, dtype=wide)


def _attend_cell(q_BNCH: Tensor, keys: KVReader, terms: AttentionTerms, cell: _Cell) -> Part:
    span = cell.span
    k_RKSH, v_RKSV = keys.read(span.slots.start + cell.first, span.slots.start + cell.end)
    q_RNQH = q_BNCH if span.num_queries == span.num_new else q_BNCH[:, :, -span.num_queries :]
    if span.rows != EVERY_ROW:
        q_RNQH, k_RKSH, v_RKSV = q_RNQH[span.rows], k_RKSH[span.rows], v_RKSV[span.rows]
    if span.at_T is None:
        k_start = span.at[cell.first] - span.pad
        return attend_range(q_RNQH, k_RKSH, v_RKSV, terms, q_start=span.query, k_start=k_start)
    if span.num_queries == 1 and terms.key_bias is None:
        rule, query = terms.rule, span.query
        if rule is None or rule.is_causal(query, query + 1, rule.first_key(query)):  # it sees all of these keys
            num_keys = cell.end - cell.first
            return attend_range(q_RNQH, k_RKSH, v_RKSV, replace(terms, rule=None), q_start=num_keys, k_start=0)
    queries_Q = torch.arange(span.query, span.query + span.num_queries, device=q_BNCH.device)
    keys_S = span.at_T[cell.first : cell.end] - span.pad
    return attend_at(q_RNQH, k_RKSH, v_RKSV, terms, queries_Q, keys_S)
