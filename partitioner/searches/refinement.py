"""Refinement of a simulated table: better entries, and more lengths where interpolation between them loses too much.

On slow links TTFT has several valleys (local minima), and interpolating between splits of different valleys is useless.
So the split found at one length is also tried at its neighbours, until that helps no more. Then lookups at lengths
between those of the table are compared with searches there. Where they lose too much, the two entries around them are
fitted to each other (`lookup_fit`). Where that is not enough, the valley changes, and the two lengths around the change
are added (`valley_change`), or otherwise the length that loses most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, log

from partitioner.searches.evaluations import SearchResult
from partitioner.searches.lookup_fit import NEARLY_BEST, fit_entry
from partitioner.searches.table_search import TableSearch
from partitioner.searches.valley_change import valley_change
from partitioner.table.entry import scaled
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


class Refinement:
    """Refines the table of a search whose evaluations are quick. With the grid, which takes no seeds, it adds lengths
    only.

    Args:
        search: has searched every length of the table to refine.
    """

    def __init__(self, search: TableSearch) -> None:
        self._search, self._best = search, search.best
        self._fitted: set[tuple[int, int]] = set()

    def run(self, lengths: Sequence[int]) -> Iterator[None]:
        """Refine the table; yields after every few searches.

        Args:
            lengths: those that were searched.
        """
        for count in self._search.counts:
            self._help_neighbours(lengths, count)
            yield
        if self._search.options.max_loss is not None:
            yield from self._fill(self._search.options.max_loss)

    def _fill(self, max_loss: float) -> Iterator[None]:
        """Fit entries and add lengths until a lookup between any two is good enough."""
        tried: set[tuple[int, int, int]] = set()
        changed = True
        while changed:
            changed = False
            for shorter, longer in pairwise(sorted({length for length, _ in self._search.trails})):
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
                        for each in self._search.counts:
                            self._search.keep(worst, each, self._best[each][worst])

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
        counts, lengths = self._search.counts, set(self._between(shorter, longer))
        while True:
            losses = {(length, count): self._loss(length, count) for length in lengths for count in counts}
            poor = {at: loss for at, loss in losses.items() if loss > max_loss}
            suspects = {self._suspect(shorter, longer, count, max_loss) for count in counts} - {None, *lengths}
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
                seems[length] = self._cost_s(count, self._search.table.lookup(length, count)) / best_s - 1
        worst = max(seems, key=lambda length: seems[length], default=None)
        return None if worst is None or seems[worst] <= max_loss else worst

    def _loss(self, length: int, count: int) -> float:
        """Share of TTFT that a lookup loses against the best known split."""
        split = self._search.table.lookup(length, count)
        if length not in self._best[count]:
            self._best[count][length] = self._search.search(length, count, [split])
            for near in self._around(length, count):
                self._improve(length, count, self._best[count][near].partition)
            self._help_neighbours([length], count)
            split = self._search.table.lookup(length, count)
        lookup_s = self._cost_s(count, split)
        best = self._best[count][length]
        if lookup_s < best.cost_s:
            self._best[count][length] = best.ending(split, lookup_s)
        return max(0.0, lookup_s / best.cost_s - 1)

    def _fit(self, length: int, count: int) -> None:
        """Let an entry fit its neighbours."""
        search = self._search
        if not search.strategy.takes_seed:
            return
        best = self._best[count][length]
        search.progress.begin(length, count)
        entry = next(entry for entry in search.table.entries_for(count) if entry.length == length)
        task = replace(
            search.task_near(length, count),
            on_evaluation=lambda step: search.progress.tick(replace(step, cost_s=best.cost_s)),
        )
        split = fit_entry(search.evaluator.cost(length, count), search.table, entry, self._best[count], task)
        self._fitted.add((length, count))
        search.keep(length, count, best.ending(split, self._cost_s(count, split)))

    def _add_change(self, shorter: int, longer: int, between: int, count: int, max_loss: float) -> bool:
        """Add the two lengths between which the valley changes, and return whether it changes."""
        search = self._search
        if not search.strategy.takes_seed:
            return False
        change = valley_change(
            search.evaluator.cost(between, count),
            lambda split: search.search_near(split.num_tokens, count, split),
            search.table.lookup(shorter, count),
            search.table.lookup(longer, count),
            between,
            best_s=self._best[count][between].cost_s,
            max_loss=max_loss,
        )
        for split in change or ():
            length = split.num_tokens
            if shorter < length < longer:
                for each in search.counts:
                    self._add_near(length, each, split if each == count else search.table.lookup(length, each))
        return change is not None

    def _add_near(self, length: int, count: int, split: ContextPartition) -> None:
        """Add an entry that stays near a split."""
        found, best = self._search.search_near(length, count, split), self._best[count]
        best[length] = SearchResult.joined([found, best[length]]) if length in best else found
        self._fitted.add((length, count))
        self._search.keep(length, count, found)

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
        search, known_s, seed = self._search, self._best[count][length].cost_s, scaled(other, length)
        if not search.strategy.takes_seed or self._cost_s(count, seed) > (1 + HOPELESS) * known_s:
            return False
        again = search.search_near(length, count, seed)
        if again.cost_s >= (1 - BETTER) * known_s:
            return False
        at = length, count
        best = self._best[count][length] = SearchResult.joined([self._best[count][length], again])
        # An entry that was fitted to its neighbours stays if it is nearly as good.
        stays = at in self._fitted and search.trails[at].cost_s <= (1 + NEARLY_BEST) * best.cost_s
        if at in search.trails and not stays:
            self._fitted.discard(at)
            search.keep(length, count, best)
        return True

    def _cost_s(self, count: int, partition: ContextPartition) -> float:
        return self._search.evaluator.cost(partition.num_tokens, count)(partition)
