"""KV caches of rows that have nothing in common but the model, as one cache: rows join and leave without a copy."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.attention.causal import nothing
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
    """

    def __init__(self, rows: Sequence[KVStore], pads: Sequence[int]) -> None:
        self._rows, self._pads = list(rows), list(pads)
        split = _SplitTokens()
        # No layer refers to this cache: a cycle would keep the rows that left until the garbage collector comes.
        self.layers = [
            RowsLayer(rows=list(layers), split=split) for layers in zip(*(row.layers for row in rows), strict=True)
        ]

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

    def __init__(self) -> None:
        self._whole: NewTokens | None = None
        self._rows: list[NewTokens] = []

    def __call__(self, tokens: NewTokens) -> list[NewTokens]:
        if tokens is not self._whole:
            self._whole = tokens
            self._rows = [NewTokens(tokens.start - pad, [0], tokens.phase) for pad in tokens.row_pads]
        return self._rows


@dataclass(kw_only=True)
class RowsLayer(LayerStore):
    """One layer of all rows."""

    rows: list[LayerStore]
    split: _SplitTokens

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        for row, k_1KCH, v_1KCV, own in zip(
            self.rows, k_BKCH.split(1), v_BKCV.split(1), self.split(tokens), strict=True
        ):
            row.append(k_1KCH, v_1KCV, own)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenRows:
        rows = [
            row.seen(q_1NCH, own)
            for row, q_1NCH, own in zip(self.rows, q_BNCH.split(1), self.split(tokens), strict=True)
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
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
