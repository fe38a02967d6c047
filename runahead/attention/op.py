"""Attention of new tokens to stored ones: runs of tokens lie in memory, spans say which queries see which of them.

The order is the same on all ranks and for all stores: the queries' own chunk first, which needs nothing of other ranks,
then what was stored before on this rank, then what may still arrive. It depends on shapes alone, never on what has
arrived, so the same prompt has the same bits. A single query takes one call for its own token and the others in its
memory. What is found in different memory is put together where no query sees both, and else merged exactly.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, R rows, Q queries of a row, S keys, H head dim, V value dim.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from runahead.attention.masks import MaskRule
from runahead.attention.partial import (
    AttentionTerms,
    KeyBias,
    attend_at,
    attend_sequences,
    merge,
    takes_own_with_earlier,
)
from runahead.attention.partial import attend as attend_range
from runahead.attention.sparse.blocks import Chosen, attend_to_chosen

Part: TypeAlias = tuple[Tensor, Tensor]
"""Output (B, N, C, V) and log-sum-exp (B, N, C) of attention to some keys; 0 and -inf of a query that sees none."""

OnDevice: TypeAlias = Tensor | Callable[[], Tensor]
"""Positions on the device that computes, or what sends them there when they are needed."""

EVERY_ROW = slice(None)


class KVReader(Protocol):
    """Stored keys and values of one layer."""

    @property
    def value_dim(self) -> int: ...

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (R, K, S, H) and values (R, K, S, V) in the slots [start, end), of all rows that are stored here."""

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """Keys (1, U, T, H) and values (1, U, T, V) of all slots, U = B K."""


class Codec(ABC):
    """Stored keys and values of one layer in a form of which attention knows more than how to read it."""

    @property
    @abstractmethod
    def value_dim(self) -> int: ...

    @abstractmethod
    def attend(
        self, q_RNQH: Tensor, start: int, end: int, terms: AttentionTerms, *, q_start: int, k_start: int
    ) -> Part:
        """Attention of queries of all rows that are stored here to the slots [start, end), all of them before these.

        Args:
            q_start, k_start: positions of the first query and of the first slot's token.

        Returns:
            as `partial.attend`.
        """


def nothing() -> None:
    """The `await_prefix` of a prefix that is stored already; returns at once."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Stored tokens of some rows, in the order of their positions, and the new tokens whose queries see them.

    Attributes:
        rows: rows of the batch. Each sees a row of the memory, or all of them see its only one.
        stored: these rows of the memory.
        pad: left padding of the rows.
        slots: numbers under which the memory is read.
        at: index in the padded batch of the token in each slot; its position is `at` - `pad`. A slot has its own number
            where tokens are contiguous, or where some were dropped and only the order of those that are left counts.
        at_T: the same on the device that computes, or what returns it, where tokens between these lie elsewhere.
        queries: numbers of the new tokens.
        positions: their positions, or later ones where all of them see all slots.
        positions_Q: the same on the device that computes, or what returns it, where they are not contiguous.
        has_new: whether the last slots hold the new tokens; else all slots are before them.
        apart: returns spans that take the place of this one where positions count (windows, biases), if this one gives
            the order of tokens alone.
        chosen: the blocks of slots, which are numbered as `at`, that blocks of queries see; None: they see all.
    """

    rows: slice | Tensor
    stored: slice
    pad: int
    slots: range
    at: Sequence[int]
    queries: range
    positions: Sequence[int]
    has_new: bool
    at_T: OnDevice | None = None
    positions_Q: OnDevice | None = None
    apart: Callable[[], Sequence[Span]] | None = None
    chosen: Chosen | None = None


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Sequences of stored tokens of which the device knows how many there are; they see one new token each.

    Attributes:
        starts: slot of each sequence's first token, and the end of the last (S + 1, int32).
        seen_S: tokens that the new token sees, with itself (int32).
        room: most tokens of a sequence.
        may_be_empty: a sequence may have no token that the new one sees.
        places: where the tokens lie that are seen, if the host knows it.
        apart: returns runs that take the place of this one where scores are modified, which its kernel does not.
    """

    starts: Tensor
    seen_S: Tensor
    room: int
    may_be_empty: bool = False
    places: Sequence[range] | None = None
    apart: Callable[[], Sequence[Run]] | None = None


class Run(NamedTuple):
    """Tokens in one memory, and spans that say which new tokens see which of them; no new token is in two spans.

    Attributes:
        bias: (a family's bias, rows of the batch, slots) -> the bias (R, N, S) of the tokens in these slots, where
            their positions are not those of the spans, since tokens between them were dropped.
    """

    keys: KVReader | Codec
    spans: Sequence[Span] | Lengths
    bias: Callable[[KeyBias, slice | Tensor, slice], Tensor] | None = None


class Step(NamedTuple):
    """Runs whose parts are put together before they are merged with others: no new token sees two of them.

    Attributes:
        arrives: tokens before the new ones may still be on their way from other ranks.
    """

    runs: Sequence[Run]
    arrives: bool = True


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
    at_T: OnDevice | None = None,
    has_new: bool = True,
) -> list[Span]:
    """Spans of a left-padded batch in these slots; rows whose new tokens are all padding are in none of them.

    Args:
        start: index of the first of the new tokens.
        at, at_T: as of `Span`; by default the numbers of the slots.
    """
    spans = list[Span]()
    for rows, pad in rows_by_pad(pads):
        positions = range(max(0, start - pad), start + num_new - pad)
        if positions:
            spans.append(
                Span(
                    rows=rows,
                    stored=rows,
                    pad=pad,
                    slots=slots,
                    at=slots if at is None else at,
                    at_T=at_T,
                    queries=range(num_new - len(positions), num_new),
                    positions=positions,
                    has_new=has_new,
                )
            )
    return spans


class _Cell(NamedTuple):
    """One call: the queries of a span and its keys [first, end), by number within the span."""

    run: Run
    span: Span
    first: int
    end: int


def _cells(run: Run, span: Span, rule: MaskRule | None, *, joins: bool) -> tuple[_Cell | None, _Cell | None]:
    """The own chunk of several queries, and what they see of earlier tokens; of one query all that it sees.

    Args:
        joins: the first of these may have the second, too, if all of its tokens follow each other.
    """
    before, own = len(span.slots), None
    if span.has_new and len(span.queries) > 1:
        before -= len(span.queries)
        own = _Cell(run, span, before, len(span.slots))
    first_key = 0 if rule is None else rule.first_key(span.positions[0])
    first = bisect_left(span.at, first_key + span.pad, hi=before)
    if own is not None and joins and span.at_T is None and span.positions_Q is None:
        last = len(span.slots) - 1
        if span.at[last] - span.at[first] == last - first:
            return _Cell(run, span, first, last + 1), None
    return own, _Cell(run, span, first, before) if first < before else None


def attend(
    q_BNCH: Tensor,
    steps: Sequence[Step],
    terms: AttentionTerms,
    *,
    await_prefix: Callable[[], None] = nothing,
    num_sequences: int | None = None,
) -> Part:
    """Attention of the new tokens of a batch to stored ones, merged in at least float32, without sinks.

    Args:
        steps: what the new tokens see. Of those that arrive, tokens before the new ones are read only after
            `await_prefix` has returned.
        num_sequences: KV heads of a row, if each of them is a row of the steps.

    Returns:
        output in the queries' dtype if it is of one part, else in that of the log-sum-exp; see `finish`.
    """
    found, sees_own = None, False
    keys, spans, _ = steps[0].runs[0]
    if isinstance(spans, Lengths):
        if spans.apart is not None and terms.needs_scores:
            steps = [Step(spans.apart()), *steps[1:]]
        else:
            assert not terms.needs_scores, "the kernel for sequences modifies no scores"
            found, sees_own = _attend_lengths(q_BNCH, keys, spans, terms), not spans.may_be_empty
            if len(steps) == 1:  # in the order of heads, however they are grouped
                return found
            steps = steps[1:]
    if num_sequences is not None:
        shape = q_BNCH.shape[:3]
        q_BNCH = q_BNCH.reshape(shape[0] * num_sequences, -1, *q_BNCH.shape[2:])
        if found is not None:
            found = found[0].reshape(*q_BNCH.shape[:3], -1), found[1].reshape(q_BNCH.shape[:3])
        out, lse = _attend(q_BNCH, steps, terms, await_prefix, found, sees_own)
        return out.reshape(*shape, -1), lse.reshape(shape)
    return _attend(q_BNCH, steps, terms, await_prefix, found, sees_own)


def _attend(
    q_BNCH: Tensor,
    steps: Sequence[Step],
    terms: AttentionTerms,
    await_prefix: Callable[[], None],
    found: Part | None,
    sees_own: bool,
) -> Part:
    """Merge what the new tokens see in spans into what was found so far, if anything.

    Args:
        sees_own: each query has found its own token.
    """
    rule, own = terms.rule, list[_Cell]()
    sees_all = terms.sees_all
    earlier: tuple[list[list[_Cell]], list[list[_Cell]]] = ([], [])  # stored here, arriving
    for runs, arrives in steps:
        cells, is_here = list[_Cell](), not arrives or await_prefix is nothing
        for run in runs:
            joins = is_here and not isinstance(run.keys, Codec) and run.bias is None
            joins = joins and takes_own_with_earlier(q_BNCH, run.keys.value_dim, terms)
            assert not isinstance(run.spans, Lengths), "sequences of which the device knows the lengths come first"
            takes_order = sees_all and (terms.key_bias is None or run.bias is not None)
            for span in run.spans:
                for each in (span,) if takes_order or span.apart is None else span.apart():
                    new, before = _cells(run, each, rule, joins=joins)
                    if new is not None:
                        own.append(new)
                    if before is not None:
                        cells.append(before)
        if cells:
            earlier[not is_here].append(cells)
    for cells in (own, *earlier[False]):
        if cells:
            found = _merged(q_BNCH, terms, cells, found, sees_own)
            sees_own = sees_own or _sees_own(q_BNCH, cells)
    await_prefix()
    for cells in earlier[True]:
        found = _merged(q_BNCH, terms, cells, found, sees_own)
        sees_own = sees_own or _sees_own(q_BNCH, cells)
    return _no_part(q_BNCH, steps[0].runs[0].keys.value_dim) if found is None else found


def _attend_lengths(q_BN1H: Tensor, keys: KVReader | Codec, lengths: Lengths, terms: AttentionTerms) -> Part:
    """Attention of one query per sequence; rows without padding are one sequence with the heads of all of them."""
    assert not isinstance(keys, Codec), "the kernel reads keys and values as they are"
    out_SNV, lse_SN = attend_sequences(
        q_BN1H.reshape(len(lengths.seen_S), -1, q_BN1H.shape[3]),
        *keys.sequences,
        starts=lengths.starts,
        used_S=lengths.seen_S,
        longest=lengths.room,
        scaling=terms.scaling,
        may_be_empty=lengths.may_be_empty,
        places=lengths.places,
    )
    return out_SNV.reshape(*q_BN1H.shape[:3], -1), lse_SN.reshape(q_BN1H.shape[:3])


def finish(part: Part, terms: AttentionTerms, dtype: torch.dtype) -> Tensor:
    """Output (B, N, C, V): with the family's sinks, then rounded to the model's dtype."""
    out, lse = part
    if terms.sinks_N is not None:  # exp(sink) is added to the softmax's denominator
        out = out * torch.sigmoid(lse - terms.sinks_N.to(lse.dtype)[None, :, None]).unsqueeze(-1)
    return out if out.dtype == dtype else out.to(dtype)


def _sees_own(q_BNCH: Tensor, cells: Sequence[_Cell]) -> bool:
    """Whether a cell has the own token of each query, so that none sees nothing."""
    span = cells[0].span
    return span.has_new and span.rows is EVERY_ROW and len(span.queries) == q_BNCH.shape[2]


def _merged(q_BNCH: Tensor, terms: AttentionTerms, cells: Sequence[_Cell], found: Part | None, sees_own: bool) -> Part:
    """Merge the part of cells that have no query in common into what was found so far, if anything.

    One cell of all queries is its kernel's result. One of some queries is merged into these alone.

    Args:
        sees_own: each query has found its own token.
    """
    parts = [_attend_cell(q_BNCH, terms, cell) for cell in cells]
    span, (out, lse) = cells[0].span, parts[0]
    if found is not None and len(cells) == 1 and lse.shape != q_BNCH.shape[:3]:
        place = span.rows, slice(None), slice(span.queries.start, span.queries.stop)
        all_out, all_lse = found[0].to(found[1].dtype), found[1]
        is_view = isinstance(span.rows, slice)
        part = merge(all_out[place], all_lse[place], out, lse, may_see_none=not sees_own, in_place=is_view)
        if not is_view:
            all_out[place], all_lse[place] = part
        return all_out, all_lse
    places = [(cell.span.rows, cell.span.queries) for cell in cells]
    part = joined(q_BNCH, cells[0].run.keys.value_dim, places, parts)
    return part if found is None else merge(*found, *part, may_see_none=not sees_own)


def joined(
    q_BNCH: Tensor, value_dim: int, places: Sequence[tuple[slice | Tensor, range]], parts: Sequence[Part]
) -> Part:
    """The part of a batch from those of some of its queries; 0 and -inf of queries that are in none.

    Args:
        places: rows and numbers of the queries of each part, of which no two have one in common.
    """
    if len(parts) == 1 and parts[0][0].shape[:3] == q_BNCH.shape[:3]:
        return parts[0]
    if _are_rows_in_order(places, len(q_BNCH), q_BNCH.shape[2]):
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    out_BNCV, lse_BNC = _no_part(q_BNCH, value_dim, [out.dtype for out, _ in parts])
    for (rows, queries), (out, lse) in zip(places, parts, strict=True):
        place = rows, slice(None), slice(queries.start, queries.stop)
        out_BNCV[place] = out
        lse_BNC[place] = lse
    return out_BNCV, lse_BNC


def _are_rows_in_order(places: Sequence[tuple[slice | Tensor, range]], num_rows: int, num_new: int) -> bool:
    """Whether these are all new tokens of all rows, some rows after the others, as in decoding."""
    end = 0
    for rows, queries in places:
        if not isinstance(rows, slice) or rows.start != end or len(queries) != num_new:
            return False
        end = rows.stop
    return end == num_rows


def _no_part(q_BNCH: Tensor, value_dim: int, dtypes: Sequence[torch.dtype] = ()) -> Part:
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    dtype = reduce(torch.promote_types, dtypes, q_BNCH.dtype)
    out_BNCV = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim, dtype=dtype)
    return out_BNCV, q_BNCH.new_full(q_BNCH.shape[:3], -math.inf, dtype=wide)


def _attend_cell(q_BNCH: Tensor, terms: AttentionTerms, cell: _Cell) -> Part:
    (keys, _, bias), span, first, end = cell
    q_RNQH = q_BNCH
    if len(span.queries) != q_BNCH.shape[2]:
        q_RNQH = q_BNCH[:, :, span.queries.start : span.queries.stop]
    if span.rows is not EVERY_ROW:
        q_RNQH = q_RNQH[span.rows]
    slots = span.slots.start + first, span.slots.start + end
    if terms.key_bias is not None and bias is not None and span.at_T is None:
        bias_RNS, key = bias(terms.key_bias, span.rows, slice(*slots)), span.at[first] - span.pad
        terms = replace(terms, key_bias=lambda keys_S: bias_RNS[..., keys_S - key])
    if isinstance(keys, Codec):
        return keys.attend(q_RNQH, *slots, terms, q_start=span.positions[0], k_start=span.at[first] - span.pad)
    k_RKSH, v_RKSV = keys.read(*slots)
    if span.stored is not EVERY_ROW:
        k_RKSH, v_RKSV = k_RKSH[span.stored], v_RKSV[span.stored]
    if span.chosen is not None:
        of_queries = range(span.positions[0] + span.pad, span.positions[-1] + span.pad + 1)
        of_keys = range(span.at[first], span.at[end - 1] + 1)
        return attend_to_chosen(q_RNQH, k_RKSH, v_RKSV, terms, span.chosen.of(span.rows, of_queries, of_keys))
    num_rows = len(q_RNQH)
    if num_rows == len(k_RKSH):
        return _attend_read(q_RNQH, k_RKSH, v_RKSV, terms, cell)
    # All queries see all of these keys: as queries of one row, so that the keys are read once (Hydragen).
    part = _attend_read(q_RNQH.transpose(0, 1).flatten(1, 2)[None], k_RKSH, v_RKSV, terms, cell)
    out_RNQV, lse_RNQ = (x[0].unflatten(1, (num_rows, -1)).transpose(0, 1) for x in part)
    return out_RNQV, lse_RNQ


def _attend_read(q_RNQH: Tensor, k_RKSH: Tensor, v_RKSV: Tensor, terms: AttentionTerms, cell: _Cell) -> Part:
    _, span, first, end = cell
    query, last, key = span.positions[0], span.positions[-1], span.at[first] - span.pad
    if span.at_T is None and span.positions_Q is None:
        return attend_range(q_RNQH, k_RKSH, v_RKSV, terms, q_start=query, k_start=key)
    rule, device, is_own = terms.rule, q_RNQH.device, span.has_new and key == query
    in_order = is_own or query == last or span.at[end - 1] - span.pad < query
    if in_order and terms.key_bias is None and (rule is None or rule.is_causal(query, last + 1, min(key, query))):
        start = 0 if is_own else end - first
        return attend_range(q_RNQH, k_RKSH, v_RKSV, replace(terms, rule=None), q_start=start, k_start=0)
    queries_Q, keys_T = (x() if callable(x) else x for x in (span.positions_Q, span.at_T))
    if queries_Q is None:
        queries_Q = torch.arange(query, last + 1, device=device)
    keys_S = torch.arange(key, key + end - first, device=device) if keys_T is None else keys_T[first:end] - span.pad
    num_rows = q_RNQH.shape[2] // len(span.queries)
    return attend_at(q_RNQH, k_RKSH, v_RKSV, terms, queries_Q.repeat(num_rows), keys_S)
