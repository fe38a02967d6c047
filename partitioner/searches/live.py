"""Search on live ranks: fills a lookup table by measuring TTFT, where every evaluation runs prefills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partitioner.measure import LiveCost
from partitioner.options import Method, SearchRun
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, SearchResult
from partitioner.searches.grid import grid_search
from partitioner.searches.points import Points
from partitioner.searches.progress import SearchProgress
from partitioner.searches.seeded import seeded_search
from partitioner.simulation.cluster import Cluster
from partitioner.table.entry import Entry
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks


@dataclass
class LiveSearch:
    """Search that adds measured entries to a table. Every rank makes the same calls.

    Attributes:
        table: the entries so far.
        clusters: the ranks with their measured compute, by number of ranks.
        trails: the searches that found them, by length and number of ranks.
    """

    table: LookupTable
    clusters: Mapping[int, Cluster]
    options: SearchRun
    ranks: Ranks
    model: Model
    progress: SearchProgress
    trails: dict[tuple[int, int], SearchResult] = field(default_factory=dict)

    def run(self, lengths: Sequence[int]) -> Iterator[None]:
        """Search every length and number of ranks; yields after each entry."""
        for length in lengths:
            for count in self.clusters:
                self._add(length, count)
                yield

    def _add(self, length: int, count: int) -> None:
        options = self.options.search
        live = LiveCost(self.model, self.ranks, self.options.prefill, length, repeats=options.repeats)
        idle = (length,) * (self.ranks.num_stages - count)

        def cost(partition: ContextPartition) -> float:
            return live(ContextPartition(boundaries=partition.boundaries + idle))

        self.progress.begin(length, count)
        result = self._search(length, count, self._remembered(self.progress.timed(cost), length, count))
        self.trails[length, count] = result
        spread = live.spread.get(result.partition.boundaries + idle)
        entry = Entry.of(result.partition, result.cost_s, options.objective, spread)
        self.table = self.table.merge(LookupTable(self.table.fingerprint, [entry]))

    def _search(self, length: int, count: int, cost: Cost) -> SearchResult:
        options = self.options.search
        stride = options.stride(length, count)
        if options.method is Method.grid:
            return grid_search(cost, length, count, min_stride=stride, on_evaluation=self.progress.tick)
        return seeded_search(
            cost,
            length,
            count,
            min_stride=stride,
            seed=equal_work(length, count, self.clusters[count].compute),
            reach=options.reach_tokens(length, count),
            leave_out=False,
            on_evaluation=self.progress.tick,
        )

    def _remembered(self, cost: Cost, length: int, count: int) -> Cost:
        """The cost, with points of earlier runs, which rank 0 keeps in a file beside the table."""
        options = self.options.search
        purpose = {"fingerprint": self.table.fingerprint.key(), "objective": options.objective.name}
        points = Points(Path(f"{self.options.table}.points.jsonl") if self.ranks.rank == 0 else None, purpose)
        known = self.ranks.on_rank_0("earlier points", lambda: {} if options.force else points.read())
        points.known = {key: value for key, value in known.items() if len(key) == count + 1 and key[-1] == length}
        return points.remembering(cost)
