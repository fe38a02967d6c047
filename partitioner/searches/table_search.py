"""Fills a lookup table: a search for every prompt length and number of ranks, on live ranks or by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.options import SearchOptions
from partitioner.searches import STRATEGIES
from partitioner.searches.best_split import starts
from partitioner.searches.evaluations import SearchResult, SearchTask
from partitioner.searches.evaluators import Evaluator
from partitioner.searches.progress import SearchProgress
from partitioner.table.entry import TableEntry, scaled
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition


class TableSearch:
    """Adds entries to a table.

    Args:
        table: entries of earlier runs, which are also seeds if evaluations are quick.

    Attributes:
        table: the entries so far.
        trails: the searches that found them, by length and number of ranks.
        best: the best split known by number of ranks and length, also of lengths that are not in the table.
    """

    def __init__(
        self, table: LookupTable, evaluator: Evaluator, options: SearchOptions, progress: SearchProgress
    ) -> None:
        self.table, self.trails = table, dict[tuple[int, int], SearchResult]()
        self.evaluator, self.options, self.progress = evaluator, options, progress
        self.counts = list(evaluator.clusters)
        self.strategy = STRATEGIES[options.method]
        self.best: dict[int, dict[int, SearchResult]] = {count: {} for count in self.counts}
        self._given, self._entries = table, dict[tuple[int, int], TableEntry]()

    def run(self, lengths: Sequence[int]) -> Iterator[None]:
        """Search every length and number of ranks; yields after each."""
        for length in lengths:
            for count in self.counts:
                seeds = self._nearest(length, count) if self.evaluator.is_quick else []
                self.best[count][length] = self.search(length, count, seeds)
                self.keep(length, count, self.best[count][length])
                yield

    def search(self, length: int, count: int, seeds: Sequence[ContextPartition]) -> SearchResult:
        """Search the best split of one length, and, by a strategy that takes seeds, also near these."""
        cluster, cost = self.evaluator.clusters[count], self.evaluator.cost(length, count)
        ranks_alike = cluster.is_uniform and self.evaluator.is_quick  # which nobody knows of live ranks
        self.progress.begin(length, count)
        if not self.strategy.takes_seed:
            return self.strategy.search(cost, self._task(length, count, ranks_alike=ranks_alike))
        balanced, *others = starts(length, count, cluster)
        start = min([balanced, *others], key=cost) if self.evaluator.is_quick else balanced
        task = self._task(length, count, self.options.reach_tokens(length, count), ranks_alike=ranks_alike)
        found = self.strategy.search(cost, task, start)
        return SearchResult.joined([found, *(self.search_near(length, count, seed) for seed in seeds)])

    def search_near(self, length: int, count: int, seed: ContextPartition) -> SearchResult:
        """Search the best split near a seed, by a strategy that takes one."""
        self.progress.begin(length, count)
        return self.strategy.search(self.evaluator.cost(length, count), self.task_near(length, count), seed)

    def task_near(self, length: int, count: int) -> SearchTask:
        """A search near a seed: its reach is a quarter of an even chunk."""
        return self._task(length, count, max(self.options.stride(length, count), length // (4 * count)))

    def keep(self, length: int, count: int, result: SearchResult) -> None:
        """Put the result of a search into the table, in place of this run's entry for the length."""
        self.trails[length, count] = result
        self._entries[length, count] = TableEntry(
            length=length,
            ranks=count,
            boundaries=result.partition.in_blocks(self.evaluator.clusters[count].block).boundaries,
            ttft_s=result.cost_s,
            objective=self.options.objective.name,
            spread=self.evaluator.spread(result.partition),
        )
        self.table = self._given.merge(LookupTable(self._given.fingerprint, list(self._entries.values())))

    def _task(self, length: int, count: int, reach: int | None = None, *, ranks_alike: bool = False) -> SearchTask:
        return SearchTask(
            num_tokens=length,
            num_ranks=count,
            min_stride=self.options.stride(length, count),
            reach=reach,
            leave_out=reach is None,  # which moves boundaries far
            ranks_alike=ranks_alike,
            on_evaluation=self.progress.tick,
        )

    def _nearest(self, length: int, count: int) -> list[ContextPartition]:
        """The table's entries around a length, scaled to it, as seeds."""
        known = self.table.entries_for(count)
        shorter = [entry for entry in known if entry.length <= length][-1:]
        longer = [entry for entry in known if entry.length > length][:1]
        return [scaled(entry.partition, length) for entry in (*shorter, *longer)]
