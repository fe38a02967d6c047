"""Causal attention of new tokens to stored keys and values, row by row if a batch is padded."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens, H head dim, V value dim.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms, attend, merge


class KVReader(Protocol):
    """Stored keys and values of one layer."""

    @property
    def value_dim(self) -> int: ...

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of the tokens [start, end) of the padded batch."""


def nothing() -> None:
    """The `await_prefix` of a prefix that is stored already; returns at once."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows with the same padding, and their queries [q_start, q_end) and first key, counted in positions of the row."""

    rows: slice
    pad: int
    first: int
    q_start: int
    q_end: int

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start


def row_groups(q_BNCH: Tensor, terms: AttentionTerms, *, start: int, pads: Sequence[int]) -> list[RowGroup]:
    """Groups of rows that attend in one call: all rows if none is padded, else one row each.

    So no mask is needed, and nothing is computed for padding. Rows whose new tokens are all padding are in no group.
    """
    groups = []
    for rows, pad in rows_by_pad(pads):
        q_start, q_end = max(0, start - pad), start + q_BNCH.shape[2] - pad
        if q_start < q_end:
            first = 0 if terms.rule is None else terms.rule.first_key(q_start)
            groups.append(RowGroup(rows=rows, pad=pad, first=first, q_start=q_start, q_end=q_end))
    return groups


def rows_by_pad(pads: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows and their left padding: all rows at once if none is padded, else one by one."""
    return [(slice(r, r + 1), pad) for r, pad in enumerate(pads)] if any(pads) else [(slice(None), 0)]


def attend_causally(
    q_BNCH: Tensor,
    kv: KVReader,
    terms: AttentionTerms,
    *,
    start: int,
    pads: Sequence[int],
    await_prefix: Callable[[], None] = nothing,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the tokens [start, start + C) of a left-padded batch to themselves and all tokens before.

    Several queries attend to their own chunk first, which needs no prefix, and to the prefix in a second call. One
    query takes one call. The choice depends on the shape alone, never on what has arrived, so that runs repeat bit by
    bit.

    Args:
        kv: holds the new tokens; earlier tokens are read only after `await_prefix` has returned.

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
    return padded_together(q_BNCH, kv.value_dim, [group.rows for group in groups], parts)


def padded_together(
    q_BNCH: Tensor, value_dim: int, rows: Sequence[slice], parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Output (B, N, C, V) and log-sum-exp (B, N, C) of a batch from those of groups of rows; 0 and -inf on padding.

    Args:
        rows: of each group; those in no group are all padding.
        parts: output and log-sum-exp of each group's last tokens.
    """
    if len(parts) == 1 and parts[0][0].shape[:3] == q_BNCH.shape[:3]:
        return parts[0]
    if len(parts) == len(q_BNCH) and all(out.shape[2] == q_BNCH.shape[2] for out, _ in parts):  # as in decoding
        return torch.cat([out for out, _ in parts]).to(q_BNCH.dtype), torch.cat([lse for _, lse in parts])
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    out_BNCV = q_BNCH.new_zeros(*q_BNCH.shape[:3], value_dim)
    lse_BNC = q_BNCH.new_full(q_BNCH.shape[:3], -math.inf, dtype=wide)
    for group, (out, lse) in zip(rows, parts, strict=True):
        out_BNCV[group, :, -out.shape[2] :] = out
        lse_BNC[group, :, -out.shape[2] :] = lse
    return out_BNCV, lse_BNC
