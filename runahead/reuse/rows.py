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
from runahead.cache.slabs import Slabs
from runahead.reuse.cache import Group, groups_of, reused_by, reusing, steps_over
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


def rows_cache(rows: Sequence[KVStore], pads: Sequence[int], counts: Sequence[int] | None = None) -> KVStore:
    """The caches of rows that are decoded together as one.

    Args:
        rows: caches of one row each.
        pads, counts: as of `RowsCache`.
    """
    own, shared = list(rows), dict[int, tuple[Slabs, ReusedKV]]()
    for number, row in enumerate(rows):
        reused = reused_by(row)
        if reused is not None:
            assert row.slabs is not None, type(row)
            own[number] = reusing(row.slabs, replace(reused, parts=[]))
            shared[number] = row.slabs, reused
    return RowsCache(own, pads, counts, shared=SharedParts(shared, counts) if shared else None)


class SharedParts:
    """Parts that rows reuse, each once.

    Args:
        rows: those that reuse any, by number: the memory of their own tokens, and what they reuse.
        counts: as of `RowsCache`.
    """

    def __init__(self, rows: dict[int, tuple[Slabs, ReusedKV]], counts: Sequence[int] | None) -> None:
        found: dict[tuple[int, int, int], tuple[ReusedPart, list[int]]] = {}
        for number, (_, reused) in rows.items():
            for part in reused.parts:
                where = part.layers_TKX[0].data_ptr(), int(part.positions_T[0]), len(part.positions_T)
                found.setdefault(where, (part, []))[1].append(number)
        self._parts = [replace(part, rows=tuple(users)) for part, users in found.values()]
        self._reused, self._counts = {number: reused for number, (_, reused) in rows.items()}, counts
        self._slabs = next(slabs for slabs, _ in rows.values())

    def steps(self, layer: int, tokens: NewTokens, num_new: int) -> list[Step]:
        """Steps over these parts for the new tokens of all rows in a layer."""
        groups = tokens.once((self, num_new), lambda: self._groups(tokens, num_new))
        return steps_over(groups, layer, self._slabs.by_layer[layer], arrives=False)

    def _groups(self, tokens: NewTokens, num_new: int) -> list[list[Group]]:
        rows = list[tuple[int, Sequence[int]]]()
        for number, pad in enumerate(tokens.row_pads):
            reused, count = self._reused.get(number), num_new if self._counts is None else self._counts[number]
            first = tokens.start - pad
            rows.append((0, [] if reused is None else reused.positions(0, first, first + count)))
        return groups_of(self._parts, rows, self._slabs.device, joins=False)
