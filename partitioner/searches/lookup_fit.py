"""Fit of a table's entry to its neighbours, for the lookups between them.

Many splits of a prompt are within a fraction of a percent of the best and may differ widely: on slow links it hardly
matters what the first ranks do as long as the last one is busy. The interpolation of two neighbouring entries that
differ so is far worse than both. So an entry gets, of the splits that are nearly best for its own length, the one from
which lookups lose least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.searches.evaluations import Cost, SearchResult, SearchTask
from partitioner.searches.seeded import Seeded
from partitioner.table.entry import TableEntry, scaled
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition

NEARLY_BEST = 0.003
"""Share by which an entry's TTFT may exceed the best one known for its length; runs on a cluster differ far more."""
NO_FIT = 1e6
"""Added to the loss of a split that exceeds `NEARLY_BEST`: larger than any sum of losses."""


def fit_entry(
    cost: Cost,
    table: LookupTable,
    entry: TableEntry,
    known: Mapping[int, SearchResult],
    task: SearchTask,
) -> ContextPartition:
    """Find the split for `entry` from which lookups lose least: the least sum of squares of their losses and its own.

    The search starts near the best of the splits of the entry, its neighbours and `known`, all scaled to its length.

    Args:
        table: the table with the entry and its neighbours, which do not change.
        known: searches of the best known splits by length, also for the entry's own. Lookups are compared with those
            between the neighbours.
        task: limits of the search, near one of these splits.
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
    seed = min((scaled(split, entry.length) for split in splits), key=losses)
    return Seeded().search(losses, task, seed).partition
