"""Attention of rows that are decoded together: some in one KV cache, others each in a cache of its own."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, D model dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from runahead.attention.base import ForwardEndsHere, LayerAttention, LayerInput
from runahead.attention.op import Part, Step, attend, finish, joined
from runahead.attention.partial import AttentionTerms, merge, merge_parts
from runahead.attention.states import States
from runahead.cache.attention import CausalAttention, End, LayerCall
from runahead.cache.base import Gather
from runahead.cache.new_tokens import NewTokens


class SharedKV(Protocol):
    """Keys and values that several rows see, in memory of others."""

    def steps(self, layer: int, tokens: NewTokens, counts: Sequence[int]) -> Sequence[Step]:
        """Steps over them for the new tokens of all rows in a layer.

        Args:
            counts: number of new tokens of each row.
        """


class RowsAttention(LayerAttention):
    """Attention of a forward whose rows have attentions of their own, over texts of different lengths.

    The model sees a batch with padding on the left: a row's padding is the index of the new tokens minus the number of
    tokens that the row stores. Attention and policies go row by row, but for rows in one memory, so each row gets what
    it would get alone, whatever stores its keys and values.

    Args:
        rows: attention of each row alone, or of several rows in one memory. Padding in it is the policies' own: the
            model sees none of it.
        counts: of each row, how many of the forward's tokens are its own, the first ones; the others are filled up, and
            are neither stored nor attend to anything. None is all tokens of all rows; where it is given, each row has
            an attention of its own.
        shared: what the rows see besides their caches.
        gather: between ranks that each store a part of the rows and run the same forwards; None: all is here.
        ends: where the forward ends, if not with the logits; only where a layer has attended.
        states: of all rows, in one memory.
    """

    def __init__(
        self,
        rows: Sequence[CausalAttention],
        *,
        counts: Sequence[int] | None = None,
        shared: SharedKV | None = None,
        gather: Gather | None = None,
        ends: End | None = None,
        states: States | None = None,
    ) -> None:
        stored = [row.start - pad for row in rows for pad in row.pads]
        start = max(stored)
        super().__init__(start=start, pads=[start - num for num in stored])
        assert len({row.rotates for row in rows}) == 1, "all rows rotate their keys, or the model does"
        assert counts is None or len(counts) == len(rows), "each row has an attention of its own"
        self._sizes = [len(row.pads) for row in rows]
        self._places = [slice(end - size, end) for end, size in zip(accumulate(self._sizes), self._sizes, strict=True)]
        self.rows, self._counts, self._shared = list(rows), counts, shared
        self._gather, self._ends = gather, ends
        assert ends is None or ends[1] == "attended", ends
        self._tokens, self.states = NewTokens(start, self.pads), states
        self.rotates = rows[0].rotates

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        in_row = [index_C - (self.start - row.start) for row in self.rows]
        of_rows = [row.positions_BC(index) for row, index in zip(self.rows, in_row, strict=True)]
        if all(positions_1C is None for positions_1C in of_rows):
            return None
        return torch.cat(
            [
                (index - row.pads[0])[None] if positions_1C is None else positions_1C
                for row, index, positions_1C in zip(self.rows, in_row, of_rows, strict=True)
            ]
        )

    def see_ids(self, ids_BC: Tensor) -> None:
        for row, ids_1C in zip(self.rows, self._own(ids_BC, dim=1), strict=True):
            row.see_ids(ids_1C)

    def see_input(self, layer: int, given: LayerInput) -> None:
        for rows, row in zip(self._places, self.rows, strict=True):
            part = [_of_rows(each, rows, len(self.pads)) for each in (given.x_BCD, given.rest, given.keywords)]
            x_1CD, rest, keywords = part
            alone = replace(given, x_BCD=x_1CD, rest=rest, keywords=keywords, start=row.start, pads=row.pads)
            row.see_input(layer, alone)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        for row, x_1CD in zip(self.rows, self._own(x_BCD, dim=1), strict=True):
            row.see_attention_input(layer, x_1CD)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        found = [
            _found(row, row.stored(layer, *qkv, terms))
            for row, *qkv in zip(self.rows, *map(self._own, (q_BNCH, k_BKCH, v_BKCV)), strict=True)
        ]
        return self._output(layer, layer, q_BNCH, found, terms)

    def attend_shared(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        skipped: int = 0,
    ) -> Tensor:
        found = [
            _found(row, row.read(layer, source, *qkv, terms, skipped=skipped))
            for row, *qkv in zip(self.rows, *map(self._own, (q_BNCH, k_BKCH, v_BKCV)), strict=True)
        ]
        return self._output(layer, source, q_BNCH, found, terms)

    def _output(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        parts: Sequence[Part],
        terms: AttentionTerms,
    ) -> Tensor:
        """Output (B, N, C, V) of a layer: the rows' parts, merged with attention to what rows share in `source`."""
        places = [(rows, range(out.shape[2])) for rows, (out, _) in zip(self._places, parts, strict=True)]
        found = joined(q_BNCH, parts[0][0].shape[3], places, parts)
        if self._shared is not None:
            counts = self._counts or [q_BNCH.shape[2]] * len(self.pads)
            if steps := self._shared.steps(source, self._tokens, counts):
                found = merge(*found, *attend(q_BNCH, steps, terms))
        if self._gather is not None:
            found = self._over_ranks(*found, self._gather)
        if self._ends == (layer, "attended"):
            raise ForwardEndsHere
        return finish(found, terms, q_BNCH.dtype)

    def _over_ranks(self, out_BNCV: Tensor, lse_BNC: Tensor, gather: Gather) -> tuple[Tensor, Tensor]:
        """Attention to the tokens of all ranks."""
        for row, count in enumerate(self._counts or ()):
            lse_BNC[row, :, count:] = 0  # what is filled up sees nothing on any rank
        found = gather(torch.cat([out_BNCV.to(lse_BNC.dtype), lse_BNC.unsqueeze(-1)], dim=-1))
        return merge_parts(found[..., :-1], found[..., -1]), torch.logsumexp(found[..., -1], dim=0)

    def _own(self, x_BxCx: Tensor, *, dim: int = 2) -> list[Tensor]:
        """The own tokens of each row, of a tensor whose tokens are in this dim."""
        rows = list(x_BxCx.split(self._sizes))
        if self._counts is None:
            return rows
        return [row.narrow(dim, 0, count) for row, count in zip(rows, self._counts, strict=True)]


def _found(row: CausalAttention, call: LayerCall) -> Part:
    """Attention of one row by itself. Its hooks are called before the rows are put together."""
    part = call.seen.attend(call.terms)
    row.attended(call)
    return part


def _of_rows(value: Any, rows: slice, num_rows: int) -> Any:
    """Arguments of a layer for some rows: these of every tensor (B, ...) in `value`; anything else stays as it is."""
    if isinstance(value, tuple):
        return tuple(_of_rows(part, rows, num_rows) for part in value)
    if isinstance(value, dict):
        return {name: _of_rows(part, rows, num_rows) for name, part in value.items()}
    if isinstance(value, Tensor) and value.ndim >= 2 and len(value) == num_rows:
        return value[rows]
    return value
