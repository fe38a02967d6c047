"""Fits an entry of a table to its neighbours, for the lookups between them.

Many splits of a prompt are within a fraction of a percent of the best, and may have little in common: on slow links it
hardly matters what the first ranks do as long as the last one is busy. Of two neighbouring entries, one of each kind,
the interpolation is of neither and far worse than both. So of the splits that are nearly best for its own prompt an
entry takes the one from which lookups lose least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from partitioner.searches.evaluations import Cost, SearchResult, Step
from partitioner.searches.seeded import seeded_search
from partitioner.table.entry import Entry, scaled
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition

NEARLY_BEST = 0.003
"""An entry may take longer than the best split that is known for its prompt by this share, far below what a cluster
takes longer from one run to the next."""
NO_FIT = 1e6
"""Added to the cost of a split that takes longer still: above any sum of losses."""


def fit_entry(
    cost: Cost,
    table: LookupTable,
    entry: Entry,
    known: Mapping[int, SearchResult],
    *,
    min_stride: int,
    reach: int,
    on_evaluation: Callable[[Step], None] | None = None,
) -> ContextPartition:
    """The split for `entry` from which lookups lose least: by the sum of the squares of their losses, and its own.

    Searched near the best of the entry's split, of its neighbours' and of the known ones, all scaled to its length.

    Args:
        table: with the entry, and those next to it, which stay.
        known: length -> the search of the best split there that is known. Lookups are compared with those up to the
            next entries; the entry's own length must be there, too.
        min_stride, reach: as for `seeded_search`.
    """
    entries = table.entries_for(entry.ranks)
    at = entries.index(entry)
    around = [*entries[max(0, at - 1) : at], *entries[at + 1 : at + 2]]
    lowest, *_, highest = sorted([entry.length, entry.length, *(each.length for each in around)])
    compared = {length: known[length] for length in known if lowest < length < highest and length != entry.length}
    best = known[entry.length]

    def losses(split: ContextPartition) -> float:
        own = cost(split) / best.cost_s - 1
        if own > NEARLY_BEST:
            return NO_FIT + own
        fitted = LookupTable(table.fingerprint, [*around, replace(entry, boundaries=split.boundaries)])
        lost = (cost(fitted.lookup(length, entry.ranks)) / there.cost_s - 1 for length, there in compared.items())
        return sum(max(0.0, loss) ** 2 for loss in (own, *lost))

    splits = [each.partition for each in (entry, *around)]
    splits += [search.partition for search in (best, *compared.values())]
    return seeded_search(
        losses,
        entry.length,
        entry.ranks,
        min_stride=min_stride,
        seed=min((scaled(split, entry.length) for split in splits), key=losses),
        reach=reach,
        leave_out=False,
        on_evaluation=on_evaluation,
    ).partition
