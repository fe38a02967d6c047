"""The KV cache of prompts that reuse segments: slabs of new tokens, and the reused parts of segments.

A prompt's positions may have gaps, and new tokens may lie between reused ones. A token sees every token of its prompt
at a lower position. The tokens of a reused part are in ascending order of positions, so a new token sees a leading run
of them, and consecutive new tokens see the same run. Rows with as many new tokens that see the same run attend to it in
one call.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens of this forward, S tokens of a row, T tokens of a part,
# H head dim, V value dim, X = H + V.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.op import EVERY_ROW, Run, Span, Step, spans_of
from runahead.cache.base import KVStore
from runahead.cache.index import ALL_TOKENS, Block, SlabIndex, Write
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab, Slabs
from runahead.reuse.reused_kv import ReusedKV, ReusedPart

FEW_QUERIES = 64
"""Most queries that attend to each part in place. More of them attend to one copy of all parts that they see, which
costs less than an output for each part."""


def reusing(slabs: Slabs, reused: ReusedKV, *, shared_TKX: Sequence[Tensor] = ()) -> KVCache:
    """KV cache of new tokens and of the segments that their prompts reuse.

    Args:
        slabs: of the new tokens, by their index in the padded batch; or those of one row.
        reused: reused parts, and the positions of the new tokens.
        shared_TKX: of the reused parts, those that belong to this cache and others like it; one tensor per layer. The
            others belong to the segment store.
    """
    cache = KVCache(slabs, ReusedIndex(reused, slabs.device))
    cache.shared_TKX = shared_TKX
    return cache


def reused_by(cache: KVStore) -> ReusedKV | None:
    """The reused keys and values of a cache that `reusing` made; None for any other cache."""
    index = cache.slab_index
    return index.reused if isinstance(index, ReusedIndex) else None


class ReusedIndex(SlabIndex):
    """Index of new tokens whose queries see reused parts, too.

    Args:
        inner: where the new tokens lie; by default each in the slot of its index in the padded batch.
    """

    is_whole = False

    def __init__(self, reused: ReusedKV, device: torch.device, inner: SlabIndex = ALL_TOKENS) -> None:
        self.reused, self._device, self._inner = reused, device, inner
        self.is_part, self.prefix = inner.is_part, inner.prefix

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        return self._inner.writes(tokens, num_new)

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor:  # noqa: N802
        end, device = start + len(index_C), index_C.device
        rows = [self.reused.positions(row, start, end) for row in range(len(self.reused.ends))]
        offsets = [positions.start - start for positions in rows if isinstance(positions, range)]
        if len(offsets) == len(rows):
            return index_C + row_values(offsets, device)[:, None]
        return sent(torch.tensor([list(positions) for positions in rows]), device)

    def row(self, row: int, pad: int) -> ReusedIndex:
        return ReusedIndex(self.reused.row(row, pad), self._device, self._inner.row(row, pad))

    def row_slab(self, slab: KVSlab, row: int, pad: int) -> KVSlab:
        return self._inner.row_slab(slab, row, pad)

    def held(self, pad: int, num_tokens: int) -> range | None:
        return self._inner.held(pad, num_tokens)

    def for_decoding(self) -> ReusedIndex:
        """Reused parts are concatenated if that saves time; see `ReusedKV.joined`."""
        return ReusedIndex(self.reused.joined(), self._device, self._inner)

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        if tokens.left_Bc is not None:
            return self._steps_of_left(layer, slab, tokens, tokens.left_Bc)
        own = list[Step]()
        for block in self._inner.blocks(layer, slab, tokens, num_new):
            spans = tokens.once((self, block.slots, num_new), partial(self._spans, block, tokens, num_new))
            own.append(Step([Run(block.keys, spans)], block.arrives))
        if not self.reused.parts:
            return own
        groups = tokens.once((self, "parts", num_new), lambda: self._groups(tokens, num_new))
        return [*own, *steps_over(groups, layer, slab, arrives=self.reused.arrives)]

    def _spans(self, block: Block, tokens: NewTokens, num_new: int) -> Sequence[Span]:
        """The tokens of a block, by their positions, as the new tokens see them."""
        start, pads, end, num_slots = tokens.start, tokens.row_pads, tokens.start + num_new, len(block.slots)

        def of_row(row: int, pad: int) -> Span:
            rows, first = EVERY_ROW if len(pads) == 1 else slice(row, row + 1), max(start, pad)
            padding = bisect_left(block.indices, pad, hi=num_slots)
            return span_at(
                self._positions(row, block.indices[padding:num_slots]),
                self.reused.positions(row, first, end),
                self._device,
                rows=rows,
                stored=rows,
                slots=block.slots[padding:],
                queries=range(first - start, num_new),
                has_new=block.has_new,
            )

        if len(pads) == 1 or any(pads):
            return [of_row(row, pad) for row, pad in enumerate(pads) if pad < end]
        apart = cache(lambda: [of_row(row, pad) for row, pad in enumerate(pads)])
        # In order all rows are alike.
        every = spans_of(block.slots, start=start, num_new=num_new, pads=pads, at=block.indices, has_new=block.has_new)
        return [replace(span, apart=apart) for span in every]

    def _positions(self, row: int, indices: Sequence[int]) -> Sequence[int]:
        """Positions of tokens by their indices, which follow each other or are of generated tokens."""
        if isinstance(indices, range):
            return self.reused.positions(row, indices.start, indices.stop)
        return [self.reused.positions(row, index, index + 1)[0] for index in indices]

    def _steps_of_left(self, layer: int, slab: KVSlab, tokens: NewTokens, left_Bc: Tensor) -> Sequence[Step]:
        """Steps over what the tokens that are left see of all tokens: each those at lower positions."""
        own, before, parts = tokens.once((self, "left"), lambda: self._spans_of_left(tokens, left_Bc))
        reused = [
            Step([Run(SeenParts([(part, len(part.at))], None, layer, slab), spans)], self.reused.arrives)
            for part, spans in zip(self.reused.parts, parts, strict=True)
        ]
        return [Step([Run(slab, own)], arrives=False), *reused, Step([Run(slab, before)])]

    def _spans_of_left(
        self, tokens: NewTokens, left_Bc: Tensor
    ) -> tuple[Sequence[Span], Sequence[Span], Sequence[Sequence[Span]]]:
        """Spans of the chunk, of the new tokens before it, and of each reused part, row by row."""
        start, stop, pads = tokens.start, tokens.start + tokens.chunk_tokens, tokens.row_pads
        at_BC = sent(self.reused.positions_BC(torch.arange(start, stop)), self._device)
        queries_Bc = at_BC.gather(1, left_Bc)

        def span(row: int, slots: range, at: Sequence[int], stored: slice | None = None) -> Span:
            rows = EVERY_ROW if len(pads) == 1 else slice(row, row + 1)
            return Span(
                rows=rows,
                stored=rows if stored is None else stored,
                pad=0,
                slots=slots,
                at=at,
                at_T=on_device(at, self._device),
                queries=range(left_Bc.shape[1]),
                positions=self.reused.positions(row, max(start, pads[row]), stop),
                positions_Q=queries_Bc[row],
                has_new=False,
            )

        def of_new(first: int, end: int) -> list[Span]:
            slots = [(row, range(max(first, pad), end)) for row, pad in enumerate(pads) if pad < end]
            return [span(row, each, self.reused.positions(row, each.start, end)) for row, each in slots]

        here = {row for row, pad in enumerate(pads) if pad < stop}
        parts = [
            [span(row, range(len(part.at)), part.at, EVERY_ROW) for row in part.rows if row in here]
            for part in self.reused.parts
        ]
        return of_new(start, stop), of_new(0, start), parts

    def _groups(self, tokens: NewTokens, num_new: int) -> list[list[RowGroup]]:
        start, end = tokens.start, tokens.start + num_new
        firsts = [min(end, max(start, pad)) for pad in tokens.row_pads]
        rows = [(first - start, self.reused.positions(row, first, end)) for row, first in enumerate(firsts)]
        return groups_of(self.reused.parts, rows, self._device)


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """New tokens that see the same leading tokens of reused parts.

    Attributes:
        rows: rows of the batch.
        span: where the seen tokens lie in the parts, one after another by position.
        parts: parts, and how many of their tokens are seen.
        order_T: places of the seen tokens, by position, if the parts lie one after another in another order.
    """

    rows: tuple[int, ...]
    span: Span
    parts: Sequence[tuple[ReusedPart, int]]
    order_T: Tensor | None


Rows: TypeAlias = Sequence[tuple[int, Sequence[int]]]
"""Number of the first new token and ascending positions of all new tokens, by row of the batch."""


def groups_of(
    parts: Sequence[ReusedPart], rows: Rows, device: torch.device, *, joins: bool = True
) -> list[list[RowGroup]]:
    """Groups of new tokens by what they see of reused parts; those of a list have no new token in common.

    Args:
        device: that computes.
        joins: many new tokens attend to a copy of all parts that they see, but for those that are mapped.
    """
    found: list[tuple[tuple[int, ...], range, list[tuple[ReusedPart, int]]]] = []
    many: dict[tuple[tuple[int, ...], range], list[tuple[ReusedPart, int]]] = {}
    in_order = sorted((part for part in parts if part.at), key=lambda part: part.at[0])  # so bits depend on texts alone
    for part in in_order:
        for (num_seen, queries), of_rows in _queries_by_num_seen(part, rows).items():
            key = tuple(of_rows), queries
            if key in many and not part.is_mapped:
                many[key].append((part, num_seen))
                continue
            found.append((*key, [(part, num_seen)]))
            if joins and not part.is_mapped and len(of_rows) * len(queries) > FEW_QUERIES:
                many[key] = found[-1][2]
    steps = list[list[RowGroup]]()
    for group in (_group(*each, rows, device) for each in found):
        step = next((step for step in steps if not any(_meet(group, other) for other in step)), None)
        if step is None:
            steps.append([group])
        else:
            step.append(group)
    return steps


def _queries_by_num_seen(part: ReusedPart, rows: Rows) -> dict[tuple[int, range], list[int]]:
    """Rows by how many tokens of a part they see, and which of their new tokens see so many."""
    found: dict[tuple[int, range], list[int]] = {}
    for row in part.rows:
        query, positions = rows[row]
        runs, counts = [len(part.at)], [len(positions)]
        if positions and part.at[-1] >= positions[0]:  # new tokens lie between the part's
            seen_C = torch.searchsorted(part.positions_T, torch.tensor(list(positions)))
            runs, counts = (x.tolist() for x in seen_C.unique_consecutive(return_counts=True))
        for num_seen, count in zip(runs, counts, strict=True):
            if num_seen and count:
                found.setdefault((num_seen, range(query, query + count)), []).append(row)
            query += count
    return found


def steps_over(groups: Sequence[Sequence[RowGroup]], layer: int, slab: KVSlab, *, arrives: bool) -> list[Step]:
    """Steps over the reused parts that new tokens see in a layer. `slab` has the layer's own tokens."""
    return [
        Step([Run(SeenParts(each.parts, each.order_T, layer, slab), [each.span]) for each in step], arrives)
        for step in groups
    ]


@dataclass(frozen=True)
class SeenParts:
    """Leading tokens of reused parts in one layer, read when attention comes to them: they may arrive until then.

    Attributes:
        parts, order_T: as of `RowGroup`.
        like: has the layer's own tokens.
    """

    parts: Sequence[tuple[ReusedPart, int]]
    order_T: Tensor | None
    layer: int
    like: KVSlab

    @property
    def value_dim(self) -> int:
        return self.like.value_dim

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some of these tokens (`KVReader.read`): views of a single part, else a copy."""
        if len(self.parts) == 1:
            kv_TKX = self.parts[0][0].layers_TKX[self.layer]
            if (start, end) != (0, len(kv_TKX)):
                kv_TKX = kv_TKX[start:end]
        else:
            kv_TKX = torch.cat([part.layers_TKX[self.layer][:num_seen] for part, num_seen in self.parts])
            kv_TKX = kv_TKX[start:end] if self.order_T is None else kv_TKX[self.order_T[start:end]]
        k_1KTH, v_1KTV = kv_TKX.transpose(0, 1)[None].split([self.like.key_dim, self.value_dim], dim=3)
        return k_1KTH, v_1KTV

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """Parts are not in tensors of fixed shape."""
        raise AssertionError


def span_at(at: Sequence[int], positions: Sequence[int], device: torch.device, **others: Any) -> Span:
    """A span of stored tokens and queries by their positions, which are sent to `device` where they have gaps."""
    at_T, positions_Q = on_device(at, device), on_device(positions, device)
    return Span(pad=0, at=at, at_T=at_T, positions=positions, positions_Q=positions_Q, **others)


def on_device(positions: Sequence[int], device: torch.device) -> Callable[[], Tensor] | None:
    """Function that sends positions to `device`, once; None if they are contiguous."""
    return None if isinstance(positions, range) else cache(lambda: sent(torch.tensor(list(positions)), device))


def _group(
    of_rows: tuple[int, ...], queries: range, parts: list[tuple[ReusedPart, int]], rows: Rows, device: torch.device
) -> RowGroup:
    [(part, num_seen), *others], order_T = parts, None
    at = part.at if num_seen == len(part.at) else part.at[:num_seen]
    if others:
        positions_T, order_T = torch.cat([part.positions_T[:num_seen] for part, num_seen in parts]).sort()
        at = ReusedPart(layers_TKX=(), positions_T=positions_T, rows=of_rows).at
        order_T = None if bool((order_T[1:] > order_T[:-1]).all()) else sent(order_T, device)

    def of_row(row: int) -> Span:
        first, positions = rows[row]
        return span_at(
            at,
            positions[queries.start - first : queries.stop - first],
            device,
            rows=EVERY_ROW if len(rows) == 1 else slice(row, row + 1),
            stored=EVERY_ROW,
            slots=range(len(at)),
            queries=queries,
            has_new=False,
        )

    span = of_row(of_rows[0])
    if len(of_rows) > 1:
        together = EVERY_ROW if len(of_rows) == len(rows) else row_values(of_rows, device)
        span = replace(span, rows=together, apart=cache(lambda: [of_row(row) for row in of_rows]))
    return RowGroup(rows=of_rows, span=span, parts=parts, order_T=order_T)


def _meet(a: RowGroup, b: RowGroup) -> bool:
    """Whether a new token is in both."""
    ours, theirs = a.span.queries, b.span.queries
    return ours.start < theirs.stop and theirs.start < ours.stop and not set(a.rows).isdisjoint(b.rows)
