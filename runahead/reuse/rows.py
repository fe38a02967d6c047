"""Rows that are decoded together and reuse parts of the same texts: a step reads each part once for all of them.

As Hydragen (Juravsky et al., 2024): the queries of all rows attend to a shared part in one product, each row attends to
its own tokens, and the outputs merge exactly. Which rows share what is found when they are put together.
"""

# Legend: C new tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runahead.attention.op import Step
from runahead.cache.base import KVStore
from runahead.cache.new_tokens import NewTokens
from runahead.cache.rows import RowsCache
from runahead.reuse.cache import Group, ReusedCache, groups_of, steps_over
from runahead.reuse.reused_kv import ReusedPart


def rows_cache(rows: Sequence[KVStore], pads: Sequence[int], counts: Sequence[int] | None = None) -> KVStore:
    """The caches of rows that are decoded together as one.

    Args:
        rows: caches of one row each.
        pads, counts: as of `RowsCache`.
    """
    reusing = {number: row for number, row in enumerate(rows) if isinstance(row, ReusedCache)}
    if not reusing:
        return RowsCache(rows, pads, counts)
    own: list[KVStore] = [
        ReusedCache(row.own, replace(row.reused, parts=[])) if isinstance(row, ReusedCache) else row for row in rows
    ]
    return RowsCache(own, pads, counts, shared=SharedParts(reusing, counts))


class SharedParts:
    """Parts that rows reuse, each once.

    Args:
        rows: those that reuse any, by number.
        counts: as of `RowsCache`.
    """

    def __init__(self, rows: dict[int, ReusedCache], counts: Sequence[int] | None) -> None:
        found: dict[tuple[int, int, int], tuple[ReusedPart, list[int]]] = {}
        for number, row in rows.items():
            for part in row.reused.parts:
                where = part.layers_TKX[0].data_ptr(), int(part.positions_T[0]), len(part.positions_T)
                found.setdefault(where, (part, []))[1].append(number)
        self._parts = [replace(part, rows=tuple(users)) for part, users in found.values()]
        self._rows, self._counts = rows, counts

    def steps(self, layer: int, tokens: NewTokens, num_new: int) -> list[Step]:
        """Steps over these parts for the new tokens of all rows in a layer."""
        slab = next(iter(self._rows.values())).own.layers[layer].slab
        groups = tokens.once((self, num_new), lambda: self._groups(tokens, num_new))
        return steps_over(groups, layer, slab, arrives=False)

    def _groups(self, tokens: NewTokens, num_new: int) -> list[list[Group]]:
        rows = list[tuple[int, Sequence[int]]]()
        for number, pad in enumerate(tokens.row_pads):
            row, count = self._rows.get(number), num_new if self._counts is None else self._counts[number]
            first = tokens.start - pad
            rows.append((0, [] if row is None else row.reused.positions(0, first, first + count)))
        return groups_of(self._parts, rows, next(iter(self._rows.values())).own.device, joins=False)
