"""Search on simulated clusters: fills a lookup table, and adds lengths where interpolation loses too much.

On slow links TTFT has several valleys (local minima), and interpolating between splits of different valleys is useless.
So the split found at one length is also tried at its neighbours, until that helps no more. Then lookups at lengths
between those of the table are compared with searches there. Where they lose too much, the two entries around them are
fitted to each other (`lookup_fit`). Where that is not enough, the valley changes, and the two lengths around the change
are added (`valley_change`), or otherwise the length that loses most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import ceil, inf, log

from partitioner.options import Method, SearchOptions
from partitioner.searches.evaluations import Cost, SearchResult, Step
from partitioner.searches.grid import grid_search
from partitioner.searches.lookup_fit import NEARLY_BEST, fit_entry
from partitioner.searches.planning import best_split, simulated_cost
from partitioner.searches.progress import SearchProgress
from partitioner.searches.seeded import seeded_search
from partitioner.searches.valley_change import valley_change
from partitioner.simulation.cluster import Cluster
from partitioner.table.entry import Entry, scaled
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition

APART = 1.2
"""Largest ratio between neighbouring lengths at which lookups are compared with searches."""
NARROW = 1.02
"""Ratio between two lengths above which lookups are compared with a search at least once between them. In steps of this
ratio lookups are also compared with the interpolated TTFT, without a search."""
BETTER = 0.0005
"""Share by which a split must be better to be tried at the neighbours again."""
HOPELESS = 0.03
"""Share by which a neighbour's split may be worse to be searched from."""


class SimulatedSearch:
    """Search that adds simulated entries to a table.

    Args:
        table: entries of earlier runs, which are also seeds.
        clusters: simulated clusters by number of ranks.

    Attributes:
        table: the entries so far.
        trails: the searches that found them, by length and number of ranks.
    """

    def __init__(
        self, table: LookupTable, clusters: Mapping[int, Cluster], options: SearchOptions, progress: SearchProgress
    ) -> None:
        self.table, self.trails = table, dict[tuple[int, int], SearchResult]()
        self._given, self._entries = table, dict[tuple[int, int], Entry]()
        # By number of ranks and length, also of lengths that are not in the table.
        self._best: dict[int, dict[int, SearchResult]] = {count: {} for count in clusters}
        self._fitted: set[tuple[int, int]] = set()
        self._clusters, self._options, self._progress = clusters, options, progress
        self._costs: dict[int, Cost] = {
            count: cache(progress.timed(simulated_cost(cluster))) for count, cluster in clusters.items()
        }

    def run(self, lengths: Sequence[int]) -> Iterator[None]:
        """Search every length and number of ranks; yields after every few searches."""
        for length in lengths:
            for count in self._clusters:
                self._best[count][length] = self._search(length, count, self._nearest(length, count))
                self._keep(length, count, self._best[count][length])
                yield
        for count in self._clusters:
            self._help_neighbours(lengths, count)
            yield
        if self._options.max_loss is not None:
            yield from self._fill(self._options.max_loss)

    def _fill(self, max_loss: float) -> Iterator[None]:
        """Fit entries and add lengths until a lookup between any two is good enough."""
        tried: set[tuple[int, int, int]] = set()
        changed = True
        while changed:
            changed = False
            for shorter, longer in pairwise(sorted({length for length, _ in self.trails})):
                poor = self._poor(shorter, longer, max_loss)
                changed = changed or bool(poor)
                yield
                for count in sorted({count for _, count in poor}):
                    if (shorter, longer, count) not in tried:
                        tried.add((shorter, longer, count))
                        self._fit(shorter, count)
                        self._fit(longer, count)
                        poor = self._poor(shorter, longer, max_loss)
                        yield
                if poor:
                    worst, count = max(poor, key=lambda at: poor[at])
                    if not self._add_change(shorter, longer, worst, count, max_loss):
                        for each in self._clusters:
                            self._keep(worst, each, self._best[each][worst])

    def _between(self, shorter: int, longer: int) -> list[int]:
        """Lengths between two of the table at which lookups are compared: those searched before, and few new ones."""
        known = sorted({length for best in self._best.values() for length in best if shorter < length < longer})
        lengths = set(known)
        for start, end in pairwise([shorter, *known, longer]):
            parts = ceil(log(end / start, APART) - 1e-9)  # so that rounding of a power of APART adds no part
            if parts == 1 and not known and end > NARROW * start:
                parts = 2
            lengths |= {round(start * (end / start) ** (part / parts)) for part in range(1, parts)}
        return sorted(lengths - {shorter, longer})

    def _poor(self, shorter: int, longer: int, max_loss: float) -> dict[tuple[int, int], float]:
        """Losses above `max_loss` between two lengths of the table, by length and number of ranks."""
        lengths = set(self._between(shorter, longer))
        while True:
            losses = {(length, count): self._loss(length, count) for length in lengths for count in self._clusters}
            poor = {at: loss for at, loss in losses.items() if loss > max_loss}
            suspects = {self._suspect(shorter, longer, count, max_loss) for count in self._clusters} - {None, *lengths}
            if poor or not suspects:
                return poor
            lengths |= {length for length in suspects if length is not None}

    def _suspect(self, shorter: int, longer: int, count: int, max_loss: float) -> int | None:
        """Length at which a lookup seems to lose most, if more than `max_loss`; TTFT jumps if messages change order.

        It is compared with the interpolated best TTFT per token, which changes little between searched lengths.
        """
        known = {length: best.cost_s / length for length, best in self._best[count].items()}
        seems: dict[int, float] = {}
        for start, end in pairwise(length for length in sorted(known) if shorter <= length <= longer):
            parts = ceil(log(end / start, NARROW))
            for length in {round(start * (end / start) ** (part / parts)) for part in range(1, parts)} - {start, end}:
                share = (length - start) / (end - start)
                best_s = ((1 - share) * known[start] + share * known[end]) * length
                seems[length] = self._costs[count](self.table.lookup(length, count)) / best_s - 1
        worst = max(seems, key=lambda length: seems[length], default=None)
        return None if worst is None or seems[worst] <= max_loss else worst

    def _loss(self, length: int, count: int) -> float:
        """Share of TTFT that a lookup loses against the best known split."""
        split = self.table.lookup(length, count)
        if length not in self._best[count]:
            self._best[count][length] = self._search(length, count, [split])
            for near in self._around(length, count):
                self._improve(length, count, self._best[count][near].partition)
            self._help_neighbours([length], count)
            split = self.table.lookup(length, count)
        lookup_s = self._costs[count](split)
        best = self._best[count][length]
        if lookup_s < best.cost_s:
            self._best[count][length] = _ending(best, split, lookup_s)
        return max(0.0, lookup_s / best.cost_s - 1)

    def _fit(self, length: int, count: int) -> None:
        """Let an entry fit its neighbours."""
        if self._options.method is Method.grid:
            return
        best = self._best[count][length]
        self._progress.begin(length, count)
        split = fit_entry(
            self._costs[count],
            self.table,
            next(entry for entry in self.table.entries_for(count) if entry.length == length),
            self._best[count],
            min_stride=self._options.stride(length, count),
            reach=self._near(length, count),
            on_evaluation=lambda step: self._progress.tick(replace(step, cost_s=best.cost_s)),
        )
        self._fitted.add((length, count))
        self._keep(length, count, _ending(best, split, self._costs[count](split)))

    def _add_change(self, shorter: int, longer: int, between: int, count: int, max_loss: float) -> bool:
        """Add the two lengths between which the valley changes, and return whether it changes."""
        if self._options.method is Method.grid:
            return False
        change = valley_change(
            self._costs[count],
            lambda split: self._search_near(split.num_tokens, count, split),
            self.table.lookup(shorter, count),
            self.table.lookup(longer, count),
            between,
            best_s=self._best[count][between].cost_s,
            max_loss=max_loss,
        )
        for split in change or ():
            length = split.num_tokens
            if shorter < length < longer:
                for each in self._clusters:
                    self._add_near(length, each, split if each == count else self.table.lookup(length, each))
        return change is not None

    def _add_near(self, length: int, count: int, split: ContextPartition) -> None:
        """Add an entry that stays near a split."""
        found, best = self._search_near(length, count, split), self._best[count]
        best[length] = _joined([found, best[length]]) if length in best else found
        self._fitted.add((length, count))
        self._keep(length, count, found)

    def _help_neighbours(self, lengths: Sequence[int], count: int) -> None:
        """Try the splits of these lengths at the neighbouring ones, theirs at their neighbours, and so on."""
        waiting = list(lengths)
        while waiting:
            length = waiting.pop()
            split = self._best[count][length].partition
            waiting += [near for near in self._around(length, count) if self._improve(near, count, split)]

    def _around(self, length: int, count: int) -> list[int]:
        """The next shorter and the next longer length that was searched."""
        known = sorted(self._best[count])
        return [*[each for each in known if each < length][-1:], *[each for each in known if each > length][:1]]

    def _improve(self, length: int, count: int, other: ContextPartition) -> bool:
        """Search again near the ratios of another length's split, and return whether that found a better one."""
        known_s, seed = self._best[count][length].cost_s, scaled(other, length)
        if self._options.method is Method.grid or self._costs[count](seed) > (1 + HOPELESS) * known_s:
            return False
        again = self._search_near(length, count, seed)
        if again.cost_s >= (1 - BETTER) * known_s:
            return False
        at = length, count
        best = self._best[count][length] = _joined([self._best[count][length], again])
        # An entry that was fitted to its neighbours stays if it is nearly as good.
        stays = at in self._fitted and self.trails[at].cost_s <= (1 + NEARLY_BEST) * best.cost_s
        if at in self.trails and not stays:
            self._fitted.discard(at)
            self._keep(length, count, best)
        return True

    def _search(self, length: int, count: int, seeds: Sequence[ContextPartition]) -> SearchResult:
        """Search from the start, and near the seeds."""
        cost, cluster, stride = self._costs[count], self._clusters[count], self._options.stride(length, count)
        self._progress.begin(length, count)
        tick = self._progress.tick
        if self._options.method is Method.grid:
            alike = cluster.is_uniform
            return grid_search(cost, length, count, min_stride=stride, ranks_alike=alike, on_evaluation=tick)
        result = best_split(length, count, cluster, min_stride=stride, cost=cost, on_evaluation=tick)
        return _joined([result, *(self._search_near(length, count, seed) for seed in seeds)])

    def _search_near(self, length: int, count: int, seed: ContextPartition) -> SearchResult:
        self._progress.begin(length, count)
        return seeded_search(
            self._costs[count],
            length,
            count,
            min_stride=self._options.stride(length, count),
            seed=seed,
            reach=self._near(length, count),
            leave_out=False,
            on_evaluation=self._progress.tick,
        )

    def _near(self, length: int, count: int) -> int:
        """Reach of a search near a seed, in tokens: a quarter of an even chunk."""
        return max(self._options.stride(length, count), length // (4 * count))

    def _nearest(self, length: int, count: int) -> list[ContextPartition]:
        """The table's entries around a length, scaled to it, as seeds."""
        known = self.table.entries_for(count)
        shorter = [entry for entry in known if entry.length <= length][-1:]
        longer = [entry for entry in known if entry.length > length][:1]
        return [scaled(entry.partition, length) for entry in (*shorter, *longer)]

    def _keep(self, length: int, count: int, result: SearchResult) -> None:
        self.trails[length, count] = result
        self._entries[length, count] = Entry.of(result.partition, result.cost_s, self._options.objective)
        self.table = self._given.merge(LookupTable(self._given.fingerprint, list(self._entries.values())))


def _joined(searches: Sequence[SearchResult]) -> SearchResult:
    """Join searches to one: the best result, and all evaluations in order."""
    best, trail = inf, list[Step]()
    for step in (step for search in searches for step in search.trail):
        trail.append(replace(step, is_best=step.cost_s < best))
        best = min(best, step.cost_s)
    cheapest = min(searches, key=lambda search: search.cost_s)
    return replace(cheapest, trail=trail)


def _ending(search: SearchResult, partition: ContextPartition, cost_s: float) -> SearchResult:
    """The search with one more step, whose partition is the result, better or not."""
    level, stride = search.trail[-1].level, search.trail[-1].stride
    is_best = cost_s < search.cost_s
    step = Step(level=level, stride=stride, boundaries=partition.boundaries, cost_s=cost_s, is_best=is_best)
    return SearchResult(partition=partition, cost_s=cost_s, trail=[*search.trail, step])
