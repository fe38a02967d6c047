"""Causal attention of new tokens to stored keys and values, row by row where rows are padded differently."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens, H head dim, V value dim.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runahead.attention.partial import AttentionTerms, attend, merge


class KVReader(Protocol):
    """Stored keys and values of one layer."""

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of the tokens [start, end) of the padded batch."""


def nothing() -> None:
    """Wait for nothing: the whole prefix is stored."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows with the same padding, in the positions of these rows: queries [q_start, q_end), keys from `first` on."""

    rows: slice
    pad: int
    first: int
    q_start: int
    q_end: int

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start


def row_groups(q_BNCH: Tensor, terms: AttentionTerms, *, start: int, pads: Sequence[int]) -> list[RowGroup]:
    """All rows at once without padding, else one by one over their own tokens: no mask, no work on padding.

    Rows whose new tokens are all padding are in no group.
    """
    groups = []
    each_row = [(slice(r, r + 1), pad) for r, pad in enumerate(pads)] if any(pads) else [(slice(None), 0)]
    for rows, pad in each_row:
        q_start, q_end = max(0, start - pad), start + q_BNCH.shape[2] - pad
        if q_start < q_end:
            first = 0 if terms.rule is None else terms.rule.first_key(q_start)
            groups.append(RowGroup(rows=rows, pad=pad, first=first, q_start=q_start, q_end=q_end))
    return groups


def attend_causally(
    q_BNCH: Tensor,
    kv: KVReader,
    terms: AttentionTerms,
    *,
    start: int,
    pads: Sequence[int],
    await_prefix: Callable[[], None] = nothing,
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens [start, start + C) of a left-padded batch to themselves and to all tokens before them.

    Several queries attend to their own chunk first, which needs no prefix, and to the prefix in a second call; one
    query takes one call. That depends on the shape alone, never on what has arrived, so that runs repeat bit by bit.

    Args:
        kv: holds the new tokens; earlier ones are read only after `await_prefix` returned.

    Returns:
        output (B, N, C, V) and log-sum-exp (B, N, C); 0 and -inf on padding.
    """
    groups = row_groups(q_BNCH, terms, start=start, pads=pads)

    def partial(group: RowGroup, first: int, end: int) -> tuple[Tensor, Tensor]:
        q = q_BNCH[group.rows, :, -group.num_queries :]
        k, v = kv.read(first + group.pad, end + group.pad)
        return attend(q, k[group.rows], v[group.rows], terms, q_start=group.q_start, k_start=first)

    own = [partial(group, group.q_start, group.q_end) if group.num_queries > 1 else None for group in groups]
    await_prefix()
    parts = []
    for group, part in zip(groups, own, strict=True):
        if part is None:
            part = partial(group, group.first, group.q_end)
        elif group.first < group.q_start:
            part = merge(*part, *partial(group, group.first, group.q_start))
        parts.append(part)
    return padded_together(q_BNCH, kv, groups, parts, start=start)


def padded_together(
    q_BNCH: Tensor, kv: KVReader, groups: Sequence[RowGroup], parts: Sequence[tuple[Tensor, Tensor]], *, start: int
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all rows from those of each group; 0 and -inf on padding."""
    if len(parts) == 1 and parts[0][0].shape[:3] == q_BNCH.shape[:3]:
        return parts[0]
    if parts:
        value_dim, wide = parts[0][0].shape[-1], parts[0][1].dtype
    else:  # this chunk is padding in every row
        value_dim, wide = kv.read(start, start)[1].shape[-1], q_BNCH.dtype
    out_BNCV = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim)
    lse_BNC = q_BNCH.new_full(q_BNCH.shape[:3], -math.inf, dtype=wide)
    for group, (out, lse) in zip(groups, parts, strict=True):
        out_BNCV[group.rows, :, -group.num_queries :] = out
        lse_BNC[group.rows, :, -group.num_queries :] = lse
    return out_BNCV, lse_BNC
