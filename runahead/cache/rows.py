"""KV caches of rows that have nothing in common but the model, as one cache: rows join and leave without a copy."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens


class RowsCache(KVStore):
    """KV cache of a decoding step whose rows have caches of their own, of different lengths.

    The model sees a batch with padding on the left: a row's padding is the index of the new tokens minus the number of
    tokens that the row stores. Attention goes row by row, so it gives what each row would give alone.

    Args:
        rows: caches of one row each, without padding.
        pads: padding of each row.
        counts: of each row, how many of the forward's tokens are its own, the first ones; the others are filled up, and
            are neither stored nor attend to anything. None is all tokens of all rows.
    """

    def __init__(self, rows: Sequence[KVStore], pads: Sequence[int], counts: Sequence[int] | None = None) -> None:
        self._rows, self._pads = list(rows), list(pads)
        split = _SplitTokens(counts)
        # No layer refers to this cache: a cycle would keep the rows that left until the garbage collector comes.
        self.layers = [
            RowsLayer(rows=list(layers), split=split) for layers in zip(*(row.layers for row in rows), strict=True)
        ]

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        return list(self._rows)

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        own = [row.positions_BC(index_C - pad) for row, pad in zip(self._rows, self._pads, strict=True)]
        if all(positions_1C is None for positions_1C in own):
            return None
        return torch.cat(
            [
                (index_C - pad)[None] if positions_1C is None else positions_1C
                for positions_1C, pad in zip(own, self._pads, strict=True)
            ]
        )


class _SplitTokens:
    """The new tokens of each row, made once for all layers from those of the batch."""

    def __init__(self, counts: Sequence[int] | None = None) -> None:
        self._counts = counts
        self._whole: NewTokens | None = None
        self._rows: list[NewTokens] = []

    def __call__(self, tokens: NewTokens) -> list[NewTokens]:
        if tokens is not self._whole:
            self._whole = tokens
            self._rows = [NewTokens(tokens.start - pad, [0], tokens.phase) for pad in tokens.row_pads]
        return self._rows

    def own(self, x_BxCx: Tensor) -> list[Tensor]:
        """The own tokens of each row, of (B, heads, C, dim)."""
        if self._counts is None:
            return list(x_BxCx.split(1))
        return [x_1xCx[:, :, :count] for x_1xCx, count in zip(x_BxCx.split(1), self._counts, strict=True)]


@dataclass(kw_only=True)
class RowsLayer(LayerStore):
    """One layer of all rows."""

    rows: list[LayerStore]
    split: _SplitTokens

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        keys, values = self.split.own(k_BKCH), self.split.own(v_BKCV)
        for row, k_1KCH, v_1KCV, own in zip(self.rows, keys, values, self.split(tokens), strict=True):
            row.append(k_1KCH, v_1KCV, own)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenRows:
        rows = [
            row.seen(q_1NCH, own)
            for row, q_1NCH, own in zip(self.rows, self.split.own(q_BNCH), self.split(tokens), strict=True)
        ]
        return SeenRows(q_BNCH=q_BNCH, rows=rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)


@dataclass(kw_only=True)
class SeenRows(SeenKV):
    """The rows of one layer, each with its queries."""

    rows: list[SeenKV]

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        parts = [row.attend(terms, await_prefix) for row in self.rows]
        if len(parts) == 1:
            return parts[0]
        num_new = self.q_BNCH.shape[2]
        outs = [_filled(out, num_new) for out, _ in parts]
        return torch.cat(outs), torch.cat([_filled(lse[..., None], num_new)[..., 0] for _, lse in parts])


def _filled(x_1NCx: Tensor, num_new: int) -> Tensor:
    """(1, N, C, x) of a row's own tokens, followed by zeros for the others."""
    missing = num_new - x_1NCx.shape[2]
    return functional.pad(x_1NCx, (0, 0, 0, missing)) if missing else x_1NCx
