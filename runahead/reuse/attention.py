"""Attention of new tokens to each other and to K,V that were computed before, all at positions of their own.

A prompt's tokens need not be contiguous, and new ones lie between reused ones. What counts is the position: a token
sees every token of its prompt with a lower one. So of a piece of reused K,V, which lies by ascending position, a new
token sees a leading part, and new tokens in a row see the same part. They attend to it in one call, those of several
prompts of a batch together, and the parts merge exactly. A long text has all pieces that it sees put together first:
copying them once costs less than to merge what it sees in each.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens of this forward, S all new tokens, T tokens of a piece,
# Q some queries, P parts, F = B * C all queries, H head dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import overload

import torch
from torch import Tensor

from runahead.attention.causal import CausalAttention
from runahead.attention.partial import AttentionTerms, attend, attend_at
from runahead.cache.kept import KeptCache
from runahead.cache.slabs import KVCache, KVSlab

Index = slice | Tensor
"""Which of the F queries."""

FEW_PIECES = 3
"""Up to so many decoding reads where they lie: a copy of them saves too little time to be worth its memory."""
FEW_QUERIES = 64
"""Up to so many queries attend to every piece where it lies, and merge all parts at once."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """K,V that some rows of a batch see.

    Attributes:
        layers_TKX: per layer (T, K, H + V).
        positions_T: ascending; on the host.
        rows: of the batch.
        is_mapped: from a file; memory may have no room for them.
    """

    layers_TKX: Sequence[Tensor]
    positions_T: Tensor
    rows: tuple[int, ...]
    is_mapped: bool = False


@dataclass(frozen=True, kw_only=True)
class ReusedKV:
    """What a batch of prompts reuses, and where its new tokens stand.

    Attributes:
        pieces: no row sees two of the same position.
        positions_BS: of the new tokens of the left-padded batch; padding has 0. On the host.
        ends: by row, the position of the first generated token.
    """

    pieces: list[Piece]
    positions_BS: Tensor
    ends: list[int]

    def joined(self) -> ReusedKV:
        """The same for decoding: pieces that the same rows see are one, since each takes a call per layer and token.

        A few are left as they are, and so are mapped ones. Layers are copied when they are first asked for; what nobody
        else has of what they were copied from is freed.
        """
        groups: dict[tuple[int, ...], list[Piece]] = {}
        for piece in self.pieces:
            if not piece.is_mapped:
                groups.setdefault(piece.rows, []).append(piece)
        joined = [piece for group in groups.values() for piece in _joined(group)]
        return replace(self, pieces=joined + [piece for piece in self.pieces if piece.is_mapped])

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        """Positions of these tokens of the padded batch, those that are generated among them. On the host."""
        num_new = self.positions_BS.shape[1]
        ends_B1 = torch.tensor(self.ends)[:, None]
        generated_BC = ends_B1 + (index_C - num_new)[None]
        given_BC = self.positions_BS[:, index_C.clamp_max(num_new - 1)]
        return torch.where(index_C[None] < num_new, given_BC, generated_BC)


def _joined(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) <= FEW_PIECES:
        return pieces
    positions_T, order_T = torch.cat([piece.positions_T for piece in pieces]).sort()
    return [replace(pieces[0], layers_TKX=_JoinedLayers(pieces, order_T), positions_T=positions_T)]


class _JoinedLayers(Sequence[Tensor]):
    """Layers (T, K, H + V) of several pieces, each put together once."""

    def __init__(self, pieces: list[Piece], order_T: Tensor) -> None:
        self._parts: list[list[Tensor]] = [
            list(parts) for parts in zip(*(each.layers_TKX for each in pieces), strict=True)
        ]
        self._order_T = None if bool((order_T[1:] > order_T[:-1]).all()) else order_T

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, layer: int) -> Tensor: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Tensor]: ...
    def __getitem__(self, layer: int | slice) -> Tensor | list[Tensor]:
        if isinstance(layer, slice):
            return [self[each] for each in range(len(self))[layer]]
        parts = self._parts[layer]
        if len(parts) > 1:
            joined_TKX = torch.cat(parts)
            if self._order_T is not None:
                joined_TKX = joined_TKX[self._order_T.to(joined_TKX.device)]
            parts[:] = [joined_TKX]
        return parts[0]


class ReusedAttention(CausalAttention):
    """Attention of the new tokens [start, start + C) of a left-padded batch; their K,V are stored in the cache."""

    reused: ReusedKV
    _layer = 0
    _views: dict[int, list[_View]]

    def reuse(self, reused: ReusedKV) -> ReusedAttention:
        """Attend to these too."""
        self.reused, self._views = reused, {}
        return self

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return self.reused.positions_BC(index_C.cpu()).to(index_C.device)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self._layer = layer
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def attend_to_slab(
        self,
        slab: KVSlab,
        q_BNCH: Tensor,
        terms: AttentionTerms,
        await_prefix: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """As that of causal attention, whose slab holds new tokens alone: the pieces are attended to beside it."""
        batch, _, num_new, _ = q_BNCH.shape
        value_dim = slab.slab_TBKX.shape[-1] - slab.key_dim
        merged = _Merged(q_BNCH, value_dim)
        positions_BC = self.reused.positions_BC(torch.arange(self.start, self.start + num_new))
        rows = self._rows(num_new, terms, positions_BC)
        prefixes = []
        for row in rows:
            queries, positions_C = q_BNCH[row.rows, :, row.offset :], positions_BC[row.first, row.offset :]
            if num_new == 1 or self.start <= row.pad:
                own_start = row.pad  # one query takes one call
            else:
                own_start = self.start + row.offset
                prefixes.append((row, queries, positions_C))
            if num_new == 1:
                await_prefix()
            k, v = slab.read(own_start, self.start + num_new)
            own_S = positions_C
            if own_start < self.start:
                own_S = self.reused.positions_BC(torch.arange(own_start, self.start + num_new))[row.first]
            part = _partial(queries, k[row.rows], v[row.rows], terms, positions_C, own_S)
            merged.add(row.index(num_new, batch), *part)
        for view in self._seen(positions_BC):
            kv_1KTX, index = view.kv_TKX(self._layer).permute(1, 0, 2)[None], view.queries
            k_1KTH, v_1KTV = kv_1KTX[..., : slab.key_dim], kv_1KTX[..., slab.key_dim :]
            positions_Q = positions_BC.flatten()[index.cpu() if isinstance(index, Tensor) else index]
            merged.add(index, *_partial(merged.queries(index), k_1KTH, v_1KTV, terms, positions_Q, view.positions_T))
        await_prefix()
        for row, queries, positions_C in prefixes:
            k, v = slab.read(row.pad, self.start)
            before_P = self.reused.positions_BC(torch.arange(row.pad, self.start))[row.first]
            part = _partial(queries, k[row.rows], v[row.rows], terms, positions_C, before_P)
            merged.add(row.index(num_new, batch), *part)
        return merged.out_BNCV(terms.sinks_N)

    def _rows(self, num_new: int, terms: AttentionTerms, positions_BC: Tensor) -> list[_Rows]:
        """All rows at once if there is no padding and only the order of their tokens counts, else one by one."""
        batch = len(self.pads)
        if batch == 1 or (not any(self.pads) and _is_plain(terms, positions_BC.flatten(), positions_BC.flatten())):
            return [_Rows(rows=slice(None), first=0, pad=self.pads[0], offset=max(0, self.pads[0] - self.start))]
        each = [
            _Rows(rows=slice(row, row + 1), first=row, pad=pad, offset=max(0, pad - self.start))
            for row, pad in enumerate(self.pads)
        ]
        return [row for row in each if row.offset < num_new]

    def _seen(self, positions_BC: Tensor) -> list[_View]:
        """What is seen of all pieces, and by which queries. The same in all layers."""
        num_new = positions_BC.shape[1]
        if num_new not in self._views:
            parts: list[tuple[list[range], list[tuple[Piece, int]]]] = []
            together: dict[tuple[range, ...], list[tuple[Piece, int]]] = {}
            for piece in self.reused.pieces:
                for num_seen, ranges in self._queries_by_num_seen(piece, positions_BC).items():
                    if tuple(ranges) in together:
                        together[tuple(ranges)].append((piece, num_seen))
                        continue
                    parts.append((ranges, [(piece, num_seen)]))
                    if sum(len(run) for run in ranges) > FEW_QUERIES:
                        together[tuple(ranges)] = parts[-1][1]
            views = [_View(parts=seen, queries=_index(ranges, self.cache.device)) for ranges, seen in parts]
            self._views[num_new] = views
        return self._views[num_new]

    def _queries_by_num_seen(self, piece: Piece, positions_BC: Tensor) -> dict[int, list[range]]:
        """Queries, of all rows' in a row, that see something of a piece, by how many of its tokens they see."""
        num_new = positions_BC.shape[1]
        queries: dict[int, list[range]] = {}
        for row in piece.rows:
            offset = max(0, self.pads[row] - self.start)
            if offset >= num_new:
                continue
            seen_C = torch.searchsorted(piece.positions_T, positions_BC[row, offset:].contiguous())
            runs, counts = torch.unique_consecutive(seen_C, return_counts=True)
            at = row * num_new + offset
            for num_seen, count in zip(runs.tolist(), counts.tolist(), strict=True):
                if num_seen:
                    queries.setdefault(num_seen, []).append(range(at, at + count))
                at += count
        return queries


def reused_attention_over(
    cache: KVCache | KeptCache, reused: ReusedKV, *, pads: list[int]
) -> Callable[[int], ReusedAttention]:
    """The attention of single new tokens, by their index in the padded batch."""
    assert isinstance(cache, KVCache), type(cache)
    return lambda start: ReusedAttention(cache, start=start, pads=pads).reuse(reused)


@dataclass(frozen=True, kw_only=True)
class _View:
    """What some queries see of pieces: the first tokens of each."""

    parts: list[tuple[Piece, int]]
    queries: Index

    @cached_property  # every layer asks for them
    def positions_T(self) -> Tensor:  # noqa: N802
        return torch.cat([piece.positions_T[:num_seen] for piece, num_seen in self.parts])

    def kv_TKX(self, layer: int) -> Tensor:  # noqa: N802
        """Where it lies if it is one piece, else a copy."""
        seen = [piece.layers_TKX[layer][:num_seen] for piece, num_seen in self.parts]
        return seen[0] if len(seen) == 1 else torch.cat(seen)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows with the same padding: which, and which of their queries is the first that is no padding."""

    rows: slice
    first: int
    pad: int
    offset: int

    def index(self, num_new: int, batch: int) -> slice:
        """These rows' queries among all."""
        if self.rows == slice(None) and batch > 1:
            return slice(0, batch * num_new)
        return slice(self.first * num_new + self.offset, (self.first + 1) * num_new)


def _index(ranges: list[range], device: torch.device) -> Index:
    """A slice if the queries lie side by side."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(run.start, run.stop) for run in ranges]).to(device)


def _is_plain(terms: AttentionTerms, positions_Q: Tensor, positions_T: Tensor) -> bool:
    """Does only the order of these tokens count, and every query see every key with a lower position?"""
    if terms.needs_scores:
        return False
    if terms.rule is None or terms.rule.sees_everything:
        return True
    first, last = int(positions_T.min()), int(positions_Q.max())
    start = int(positions_Q.min())
    return terms.rule.is_causal(start, last + 1, min(first, start))


def _partial(
    q_BNQH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, terms: AttentionTerms, positions_Q: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys that are their own tokens, or all in front of them: output, log-sum-exp."""
    own = positions_Q is positions_T
    if _is_plain(terms, positions_Q, positions_T):
        start = 0 if own else len(positions_T)
        return attend(q_BNQH, k_BKTH, v_BKTV, replace(terms, rule=None), q_start=start, k_start=0)
    on_device = (x.to(q_BNQH.device) for x in (positions_Q, positions_T))
    return attend_at(q_BNQH, k_BKTH, v_BKTV, terms, *on_device)


class _Merged:
    """Outputs of all queries from their parts. Of a few queries, parts are merged at once, however many they are."""

    def __init__(self, q_BNCH: Tensor, value_dim: int) -> None:
        self._q = q_BNCH
        batch, num_heads, num_new, _ = q_BNCH.shape
        wide = torch.promote_types(q_BNCH.dtype, torch.float32)
        self._q_FNH = q_BNCH.transpose(1, 2).flatten(0, 1)
        self._out_FNV = q_BNCH.new_zeros(batch * num_new, num_heads, value_dim, dtype=wide)
        self._lse_FN = q_BNCH.new_full((batch * num_new, num_heads), -torch.inf, dtype=wide)
        self._waiting: dict[object, tuple[Index, list[Tensor], list[Tensor]]] = {}

    def queries(self, index: Index) -> Tensor:
        """(1, N, Q, H)."""
        return self._q_FNH[index].transpose(0, 1)[None]

    def add(self, index: Index, out_BNQV: Tensor, lse_BNQ: Tensor) -> None:
        """One more part of some of the queries."""
        same = (index.start, index.stop) if isinstance(index, slice) else id(index)
        out_QNV, lse_QN = out_BNQV.transpose(1, 2).flatten(0, 1), lse_BNQ.transpose(1, 2).flatten(0, 1)
        if len(out_QNV) > FEW_QUERIES:  # all parts of a long text would take too much memory
            self._merge_one(index, out_QNV, lse_QN)
            return
        _, outs, lses = self._waiting.setdefault(same, (index, [], []))
        outs.append(out_QNV)
        lses.append(lse_QN)

    def out_BNCV(self, sinks_N: Tensor | None) -> Tensor:  # noqa: N802
        for parts in self._waiting.values():
            self._merge(*parts)
        out_FNV = self._out_FNV
        if sinks_N is not None:  # as `runahead.attention.partial.add_sinks`
            out_FNV = out_FNV * torch.sigmoid(self._lse_FN - sinks_N.to(self._lse_FN.dtype))[..., None]
        batch, _, num_new, _ = self._q.shape
        return out_FNV.unflatten(0, (batch, num_new)).transpose(1, 2).to(self._q.dtype)

    def _merge_one(self, index: Index, out_QNV: Tensor, lse_QN: Tensor) -> None:
        """As `runahead.attention.partial.merge`."""
        before_QN, before_QNV = self._lse_FN[index], self._out_FNV[index]
        weight_QN = torch.sigmoid(lse_QN - before_QN).nan_to_num_(0.0)  # nan: neither part saw a key
        out_QNV = before_QNV.lerp_(out_QNV.to(before_QNV.dtype), weight_QN[..., None])
        self._lse_FN[index] = torch.logaddexp(before_QN, lse_QN)
        if isinstance(index, Tensor):  # else it was merged in place
            self._out_FNV[index] = out_QNV

    def _merge(self, index: Index, outs_QNV: list[Tensor], lses_QN: list[Tensor]) -> None:
        out_PQNV = torch.stack([self._out_FNV[index], *(out.to(self._out_FNV.dtype) for out in outs_QNV)])
        lse_PQN = torch.stack([self._lse_FN[index], *lses_QN])
        lse_QN = torch.logsumexp(lse_PQN, dim=0)
        weight_PQN = torch.exp(lse_PQN - lse_QN).nan_to_num_(0.0)  # at most 1; nan: no part saw a key
        self._out_FNV[index] = (out_PQNV * weight_PQN[..., None]).sum(dim=0)
        self._lse_FN[index] = lse_QN
