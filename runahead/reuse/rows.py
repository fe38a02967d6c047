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
from runahead.cache.slabs import Slabs
from runahead.reuse.cache import RowGroup, groups_of, reused_by, reusing, steps_over
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


def apart_from_shared(rows: Sequence[KVStore], *, first: int = 0) -> tuple[list[KVStore], SharedParts | None]:
    """Caches of rows without the parts that they reuse, and these parts; None if no row reuses any.

    Args:
        rows: caches of one row each. A single one is left as it is.
        first: number of the first of them that is asked for; those before it are left as they are.
    """
    own, shared = list(rows), dict[int, tuple[Slabs, ReusedKV]]()
    for number, row in enumerate(rows if len(rows) > 1 else []):
        reused = reused_by(row) if number >= first else None
        if reused is not None:
            assert row.slabs is not None, type(row)
            own[number] = reusing(row.slabs, replace(reused, parts=[]))
            shared[number] = row.slabs, reused
    return own, SharedParts(shared) if shared else None


class SharedParts:
    """Parts that rows reuse, each once.

    Args:
        rows: those that reuse any, by number: the memory of their own tokens, and what they reuse.
    """

    def __init__(self, rows: dict[int, tuple[Slabs, ReusedKV]]) -> None:
        found: dict[tuple[int, int, int], tuple[ReusedPart, list[int]]] = {}
        for number, (_, reused) in rows.items():
            for part in reused.parts:
                where = part.layers_TKX[0].data_ptr(), int(part.positions_T[0]), len(part.positions_T)
                found.setdefault(where, (part, []))[1].append(number)
        self._parts = [replace(part, rows=tuple(users)) for part, users in found.values()]
        self._reused = {number: reused for number, (_, reused) in rows.items()}
        self._slabs = next(slabs for slabs, _ in rows.values())

    def steps(self, layer: int, tokens: NewTokens, counts: Sequence[int]) -> list[Step]:
        """Steps over these parts for the new tokens of all rows in a layer, of which each row has so many."""
        groups = tokens.once((self, *counts), lambda: self._groups(tokens, counts))
        return steps_over(groups, layer, self._slabs.by_layer[layer], arrives=False)

    def _groups(self, tokens: NewTokens, counts: Sequence[int]) -> list[list[RowGroup]]:
        rows = list[tuple[int, Sequence[int]]]()
        for number, (pad, count) in enumerate(zip(tokens.row_pads, counts, strict=True)):
            reused, first = self._reused.get(number), tokens.start - pad
            rows.append((0, [] if reused is None else reused.positions(0, first, first + count)))
        return groups_of(self._parts, rows, self._slabs.device, joins=False)
