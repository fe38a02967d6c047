"""Fills a lookup table by simulation, where a look costs nothing: lengths help each other, and more are added.

The best split of a slow cluster is in one of several valleys, and between splits of different valleys interpolation is
of no use. So what was found at one length is also tried at its neighbours, until that helps no more. Then the table is
asked for lengths at a third and two thirds of the way from each to the next: where that costs too much against a search
there, the worse one is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from partitioner.cluster import Cluster
from partitioner.evaluations import Cost, SearchResult
from partitioner.grid_search import grid_search
from partitioner.lookup_table import LookupTable
from partitioner.options import Method, SearchOptions
from partitioner.planning import best_split, simulated_cost
from partitioner.search_progress import SearchProgress
from partitioner.seeded_search import seeded_search
from partitioner.table_entry import Entry, from_shares
from runahead.context import ContextPartition

NARROW = 1.2
"""Between two lengths whose quotient is at most this none is added."""
BETTER = 0.0005
"""By this share at least a split has to be better to be tried at the neighbours again."""
PLACES = (1 / 3, 2 / 3)
"""Where between two lengths a lookup is tried, on a logarithmic scale."""


class SimulatedSearch:
    """A table that grows.

    Args:
        table: what is known already; its entries are seeds, too.
        clusters: what a simulation runs on, by number of ranks.

    Attributes:
        table: the entries so far.
        trails: the searches that found them, by length and number of ranks.
    """

    def __init__(
        self, table: LookupTable, clusters: Mapping[int, Cluster], options: SearchOptions, progress: SearchProgress
    ) -> None:
        self.table, self.trails = table, dict[tuple[int, int], SearchResult]()
        self._between: dict[tuple[int, int], SearchResult] = {}
        self._clusters, self._options, self._progress = clusters, options, progress

    def run(self, lengths: Sequence[int]) -> Iterator[None]:
        """Search; gives way after every few searches."""
        for length in lengths:
            for count in self._clusters:
                self._keep(length, count, self._search(length, count, self._nearest(length, count)))
                yield
        for count in self._clusters:
            self._help_neighbours(lengths, count)
            yield
        if self._options.max_loss is not None:
            yield from self._fill(self._options.max_loss)

    def _fill(self, max_loss: float) -> Iterator[None]:
        """Add lengths until a lookup between any two is good enough."""
        added = True
        while added:
            added = False
            for shorter, longer in pairwise(sorted({length for length, _ in self.trails})):
                if longer <= NARROW * shorter:
                    continue
                between = [round(shorter ** (1 - share) * longer**share) for share in PLACES]
                losses = {length: max(self._loss(length, count) for count in self._clusters) for length in between}
                worst = max(losses, key=lambda length: losses[length])
                if losses[worst] > max_loss:
                    added = True
                    for count in self._clusters:
                        self._keep(worst, count, self._between[worst, count])
                        self._help_neighbours([worst], count)
                yield

    def _loss(self, length: int, count: int) -> float:
        """Of TTFT, by a lookup against a search, as a share. What is found is first tried at the neighbours."""
        if (length, count) not in self._between:
            found = self._search(length, count, [self.table.lookup(length, count)])
            self._between[length, count] = found
            improved = [near for near in self._around(length, count) if self._improve(near, count, found.partition)]
            self._help_neighbours(improved, count)
        lookup_s = self._cost(count)(self.table.lookup(length, count))
        return lookup_s / self._between[length, count].cost_s - 1

    def _help_neighbours(self, lengths: Sequence[int], count: int) -> None:
        """Try the splits of these lengths at the neighbouring ones, theirs at their neighbours, and so on."""
        waiting = list(lengths)
        while waiting:
            length = waiting.pop()
            split = self.trails[length, count].partition
            waiting += [near for near in self._around(length, count) if self._improve(near, count, split)]

    def _around(self, length: int, count: int) -> list[int]:
        """The next shorter and the next longer length of this search."""
        known = sorted(each for each, ranks in self.trails if ranks == count)
        return [*[each for each in known if each < length][-1:], *[each for each in known if each > length][:1]]

    def _improve(self, length: int, count: int, other: ContextPartition) -> bool:
        """Search again from the ratios of another length's split; was that worth it?"""
        if self._options.method is Method.grid:
            return False
        known = self.trails[length, count]
        self._progress.begin(length, count)
        again = seeded_search(
            self._cost(count),
            length,
            count,
            min_stride=self._options.stride(length, count),
            seed=from_shares([end / other.num_tokens for end in other.boundaries], length),
            leave_out=False,
            on_evaluation=self._progress.tick,
        )
        self._progress.end()
        if again.cost_s >= (1 - BETTER) * known.cost_s:
            return False
        self._keep(length, count, again)
        return True

    def _search(self, length: int, count: int, seeds: Sequence[ContextPartition]) -> SearchResult:
        cluster, stride = self._clusters[count], self._options.stride(length, count)
        self._progress.begin(length, count)
        if self._options.method is Method.seeded:
            result = best_split(
                length, count, cluster, min_stride=stride, seeds=seeds, on_evaluation=self._progress.tick
            )
        else:
            result = grid_search(
                self._cost(count),
                length,
                count,
                min_stride=stride,
                ranks_alike=cluster.is_uniform,
                on_evaluation=self._progress.tick,
            )
        self._progress.end()
        return result

    def _nearest(self, length: int, count: int) -> list[ContextPartition]:
        """The known entries around a length, scaled to it."""
        known = self.table.entries_for(count)
        shorter = [entry for entry in known if entry.length <= length][-1:]
        longer = [entry for entry in known if entry.length > length][:1]
        return [entry.scaled(length) for entry in (*shorter, *longer)]

    def _cost(self, count: int) -> Cost:
        return self._progress.timed(simulated_cost(self._clusters[count]))

    def _keep(self, length: int, count: int, result: SearchResult) -> None:
        self.trails[length, count] = result
        entry = Entry(
            length=length,
            ranks=count,
            boundaries=result.partition.boundaries,
            ttft_s=result.cost_s,
            objective=self._options.objective.name,
        )
        self.table = self.table.merge(LookupTable(self.table.fingerprint, [entry]))
