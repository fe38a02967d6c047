"""The KV cache of prompts that reuse segments: slabs of new tokens, and the reused parts of segments.

A prompt's positions may have gaps, and new tokens may lie between reused ones. A token sees every token of its prompt
at a lower position. The tokens of a reused part are in ascending order of positions, so a new token sees a leading run
of them, and consecutive new tokens see the same run. They attend to it in one call, together with those of other
prompts of the batch, and the outputs merge exactly. For many new tokens all parts that they see are concatenated
first, which costs less than merging one output per part.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens of this forward, T tokens of a part, Q some queries,
# H head dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from runahead.attention.merging import FEW_QUERIES, Index, MergedParts
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms, attend, attend_at
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kv_cache import KVCache, SlabLayer, SlabRow
from runahead.cache.new_tokens import NewTokens
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


class ReusedCache(KVStore):
    """KV cache of new tokens and of the segments that their prompts reuse.

    Args:
        own: slabs of the new tokens, by their index in the padded batch; or those of one row.
        reused: reused parts, and the positions of the new tokens.
        shared_TKX: of the reused parts, those that belong to this cache and others like it; one tensor per layer.
    """

    def __init__(self, own: KVCache | SlabRow, reused: ReusedKV, *, shared_TKX: Sequence[Tensor] = ()) -> None:
        self.own, self.reused, self.shared_TKX = own, reused, shared_TKX
        views = _Views(reused, own.device)
        # No layer refers to the cache: a cycle would keep both until the garbage collector comes.
        self.layers = [ReusedLayer(views=views, own=layer, number=number) for number, layer in enumerate(own.layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the new tokens. Reused parts belong to the segment store or to several caches."""
        return self.own.num_bytes

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return self.reused.positions_BC(index_C.cpu()).to(index_C.device)

    def for_decoding(self) -> ReusedCache:
        """The same cache with reused parts concatenated if that saves time; see `ReusedKV.joined`."""
        return ReusedCache(self.own, self.reused.joined())

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        assert isinstance(self.own, KVCache), "a row of a batch"
        return [ReusedCache(SlabRow(self.own, row, pad), self.reused.row(row, pad)) for row, pad in enumerate(pads)]

    def take_back(self, num_tokens: int) -> None:
        self.own.take_back(num_tokens)

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        """Keys and values of new tokens alone."""
        return self.own.row_kv(row, pad, num_tokens)


@dataclass(frozen=True, kw_only=True)
class ReusedLayer(LayerStore):
    """One layer: a slab of new tokens, and the reused parts."""

    views: _Views
    own: SlabLayer
    number: int

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        self.own.append(k_BKCH, v_BKCV, tokens)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenReused:
        return SeenReused(q_BNCH=q_BNCH, layer=self, tokens=tokens)

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes


@dataclass(kw_only=True)
class SeenReused(SeenKV):
    """New tokens and reused parts of one layer together with the queries of the newest tokens."""

    layer: ReusedLayer
    tokens: NewTokens

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        return self._merged(terms, await_prefix).result()

    def output(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Tensor:
        out_BNCV, _ = self._merged(terms, await_prefix).result(terms.sinks_N)
        return out_BNCV

    def _merged(self, terms: AttentionTerms, await_prefix: Callable[[], None]) -> MergedParts:
        """Parts of the own chunk, of what is reused and of the prefix."""
        views, slab, start, q_BNCH = self.layer.views, self.layer.own.slab, self.tokens.start, self.q_BNCH
        pads, num_new = self.tokens.row_pads, q_BNCH.shape[2]
        merged = MergedParts(q_BNCH, slab.value_dim)
        positions_BC = views.reused.positions_BC(torch.arange(start, start + num_new))

        def attend_slab(rows: slice, first: int, end: int) -> None:
            """Add the attention of these rows to the tokens [first, end) of the slab."""
            offset = max(0, pads[rows.start] - start)  # queries before it are padding
            positions_C = own_S = positions_BC[rows.start, offset:]
            if first != start + offset:
                own_S = views.reused.positions_BC(torch.arange(first, end))[rows.start]
            k, v = slab.read(first, end)
            part = _partial(q_BNCH[rows, :, offset:], k[rows], v[rows], terms, positions_C, own_S)
            merged.add(slice(rows.start * num_new + offset, rows.stop * num_new), *part)

        groups = self._row_groups(terms, positions_BC)
        for rows in groups:
            if num_new == 1:  # one query takes one call
                await_prefix()
                attend_slab(rows, pads[rows.start], start + 1)
            else:
                attend_slab(rows, max(start, pads[rows.start]), start + num_new)
        found = views.of(self.tokens, positions_BC)
        if views.reused.arrives:
            await_prefix()
        for view in found:
            kv_1KTX, index = view.kv_TKX(self.layer.number).permute(1, 0, 2)[None], view.queries
            k_1KTH, v_1KTV = kv_1KTX[..., : slab.key_dim], kv_1KTX[..., slab.key_dim :]
            positions_Q = positions_BC.flatten()[index.cpu() if isinstance(index, Tensor) else index]
            merged.add(index, *_partial(merged.queries(index), k_1KTH, v_1KTV, terms, positions_Q, view.positions_T))
        if not views.reused.arrives:
            await_prefix()
        for rows in groups:
            if num_new > 1 and pads[rows.start] < start:
                attend_slab(rows, pads[rows.start], start)
        return merged

    def _row_groups(self, terms: AttentionTerms, positions_BC: Tensor) -> list[slice]:
        """Rows that attend in one call: all rows if attention depends only on order, else one row each.

        Rows whose new tokens are all padding are in no group.
        """
        pads, end = self.tokens.row_pads, self.tokens.start + positions_BC.shape[1]
        if len(pads) == 1 or (not any(pads) and _is_plain(terms, positions_BC.flatten(), positions_BC.flatten())):
            return [slice(0, len(pads))]
        return [slice(row, row + 1) for row, pad in enumerate(pads) if pad < end]


def _queries_by_num_seen(part: ReusedPart, tokens: NewTokens, positions_BC: Tensor) -> dict[int, list[range]]:
    """Queries that see tokens of a part, as ranges of indices into all rows' queries, by the number that they see."""
    num_new = positions_BC.shape[1]
    queries: dict[int, list[range]] = {}
    for row in part.rows:
        offset = max(0, tokens.row_pads[row] - tokens.start)
        if offset >= num_new:
            continue
        seen_C = torch.searchsorted(part.positions_T, positions_BC[row, offset:].contiguous())
        runs, counts = torch.unique_consecutive(seen_C, return_counts=True)
        at = row * num_new + offset
        for num_seen, count in zip(runs.tolist(), counts.tolist(), strict=True):
            if num_seen:
                queries.setdefault(num_seen, []).append(range(at, at + count))
            at += count
    return queries


class _Views:
    """Visible leading runs of reused parts for new tokens, computed once for all layers.

    Args:
        device: that computes.
    """

    def __init__(self, reused: ReusedKV, device: torch.device) -> None:
        self.reused, self._device = reused, device
        self._found: tuple[tuple[int, int], list[_View]] | None = None

    def of(self, tokens: NewTokens, positions_BC: Tensor) -> list[_View]:
        """The leading runs of parts that new tokens see, by group of queries. They are the same in all layers."""
        asked = tokens.start, positions_BC.shape[1]
        if self._found is not None and self._found[0] == asked:
            return self._found[1]
        # One view per part and group of queries; large groups have one view of all parts that they see.
        parts: list[tuple[list[range], list[tuple[ReusedPart, int]]]] = []
        by_queries: dict[tuple[range, ...], list[tuple[ReusedPart, int]]] = {}
        for part in self.reused.parts:
            for num_seen, ranges in _queries_by_num_seen(part, tokens, positions_BC).items():
                if tuple(ranges) in by_queries:
                    by_queries[tuple(ranges)].append((part, num_seen))
                    continue
                parts.append((ranges, [(part, num_seen)]))
                if sum(len(run) for run in ranges) > FEW_QUERIES:
                    by_queries[tuple(ranges)] = parts[-1][1]
        views = [_View(parts=seen, queries=_index(ranges, self._device)) for ranges, seen in parts]
        self._found = asked, views
        return views


@dataclass(frozen=True, kw_only=True)
class _View:
    """The leading tokens of parts that some queries see.

    Attributes:
        parts: each part, and the number of its tokens that are seen.
        queries: indices of the queries.
    """

    parts: list[tuple[ReusedPart, int]]
    queries: Index

    @cached_property  # used in every layer
    def positions_T(self) -> Tensor:  # noqa: N802
        """Positions of the seen tokens."""
        return torch.cat([part.positions_T[:num_seen] for part, num_seen in self.parts])

    def kv_TKX(self, layer: int) -> Tensor:  # noqa: N802
        """Keys and values (T, K, H + V) of the seen tokens: a view of a single part, else a copy."""
        seen = [part.layers_TKX[layer][:num_seen] for part, num_seen in self.parts]
        return seen[0] if len(seen) == 1 else torch.cat(seen)


def _index(ranges: list[range], device: torch.device) -> Index:
    """Indices of queries: a slice if the ranges are contiguous, else a tensor."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(run.start, run.stop) for run in ranges]).to(device)


def _is_plain(terms: AttentionTerms, positions_Q: Tensor, positions_T: Tensor) -> bool:
    """Whether attention of these tokens depends only on their order: every query sees every key before it, no bias."""
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
    """Output and log-sum-exp of queries over keys that are their own tokens, or all come before them."""
    own = positions_Q is positions_T
    if _is_plain(terms, positions_Q, positions_T):
        start = 0 if own else len(positions_T)
        return attend(q_BNQH, k_BKTH, v_BKTV, replace(terms, rule=None), q_start=start, k_start=0)
    device = q_BNQH.device
    return attend_at(q_BNQH, k_BKTH, v_BKTV, terms, positions_Q.to(device), positions_T.to(device))
