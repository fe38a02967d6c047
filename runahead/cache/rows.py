"""KV caches of rows that are decoded together, as one cache: rows join and leave without a copy."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runahead.attention.op import Part, Step, attend, joined, nothing
from runahead.attention.partial import AttentionTerms, merge
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens


class SharedKV(Protocol):
    """Keys and values that several rows see, in memory of others."""

    def steps(self, layer: int, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        """Steps over them for the new tokens of all rows in a layer."""


class RowsCache(KVStore):
    """KV cache of a decoding step whose rows have caches of their own, of different lengths.

    The model sees a batch with padding on the left: a row's padding is the index of the new tokens minus the number of
    tokens that the row stores. Attention goes row by row, so it gives what each row would give alone.

    Args:
        rows: caches of one row each, without padding.
        pads: padding of each row.
        counts: of each row, how many of the forward's tokens are its own, the first ones; the others are filled up, and
            are neither stored nor attend to anything. None is all tokens of all rows.
        shared: what the rows see besides their caches.
    """

    def __init__(
        self,
        rows: Sequence[KVStore],
        pads: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        shared: SharedKV | None = None,
    ) -> None:
        self._rows, self._pads = list(rows), list(pads)
        split = _SplitTokens(counts)
        # No layer refers to this cache: a cycle would keep the rows that left until the garbage collector comes.
        self.layers = [
            RowsLayer(rows=list(layers), number=number, split=split, shared=shared)
            for number, layers in enumerate(zip(*(row.layers for row in rows), strict=True))
        ]

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        return list(self._rows)

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        own = [row.positions_BC(index_C - pad, start - pad) for row, pad in zip(self._rows, self._pads, strict=True)]
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

    def __call__(self, tokens: NewTokens) -> list[NewTokens]:
        return tokens.once(self, lambda: [NewTokens(tokens.start - pad, [0], tokens.phase) for pad in tokens.row_pads])

    def own(self, x_BxCx: Tensor) -> list[Tensor]:
        """The own tokens of each row, of (B, heads, C, dim)."""
        if self._counts is None:
            return list(x_BxCx.split(1))
        return [x_1xCx[:, :, :count] for x_1xCx, count in zip(x_BxCx.split(1), self._counts, strict=True)]


@dataclass(kw_only=True)
class RowsLayer(LayerStore):
    """One layer of all rows."""

    rows: list[LayerStore]
    number: int
    split: _SplitTokens
    shared: SharedKV | None = None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        keys, values = self.split.own(k_BKCH), self.split.own(v_BKCV)
        for row, k_1KCH, v_1KCV, own in zip(self.rows, keys, values, self.split(tokens), strict=True):
            row.append(k_1KCH, v_1KCV, own)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenRows:
        rows = [
            row.seen(q_1NCH, own)
            for row, q_1NCH, own in zip(self.rows, self.split.own(q_BNCH), self.split(tokens), strict=True)
        ]
        steps = () if self.shared is None else self.shared.steps(self.number, tokens, q_BNCH.shape[2])
        return SeenRows(q_BNCH=q_BNCH, steps=steps, rows=rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)


@dataclass(kw_only=True)
class SeenRows(SeenKV):
    """The rows of one layer, each with its queries; `steps` are what several of them see."""

    rows: list[SeenKV]

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Part:
        parts = [row.attend(terms, await_prefix) for row in self.rows]
        places = [(slice(row, row + 1), range(out.shape[2])) for row, (out, _) in enumerate(parts)]
        own = joined(self.q_BNCH, parts[0][0].shape[3], places, parts)
        return merge(*own, *attend(self.q_BNCH, self.steps, terms)) if self.steps else own
