"""A search fills a table, by simulation or on live ranks; lookups between its lengths are nearly as good as entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from math import log2
from pathlib import Path
from typing import Any

import pytest

from partitioner.options import Objective, SearchMethod, SearchOptions, SearchRun
from partitioner.searches.best_split import best_split, simulated_cost
from partitioner.searches.evaluations import Cost
from partitioner.searches.evaluators import LiveEvaluator, SimulatedEvaluator
from partitioner.searches.lookup_fit import NEARLY_BEST
from partitioner.searches.progress import SearchProgress
from partitioner.searches.refinement import Refinement
from partitioner.searches.table_search import TableSearch
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.entry import TableEntry
from partitioner.table.lookup_table import LookupTable
from runahead.context import ContextPartition
from tests.partitioner.clusters import llama, llama_cluster
from tests.partitioner.test_lookup_table import FINGERPRINT

LENGTHS = [2048, 4096, 8192, 16384]


def searched(cluster: Cluster, lengths: list[int], known: Sequence[TableEntry] = (), **changes: object) -> LookupTable:
    options = SearchOptions(objective=Objective.modelled, min_stride=64, **changes)  # type: ignore[arg-type]
    with SearchProgress([], options, shown=False) as progress:
        clusters = {1: replace(cluster, speed=cluster.speed[:1], links=None), cluster.num_ranks: cluster}
        evaluator = SimulatedEvaluator(clusters, progress)
        search = TableSearch(LookupTable(FINGERPRINT, list(known)), evaluator, options, progress)
        for _ in chain(search.run(lengths), Refinement(search).run(lengths)):
            pass
    for length in search.table.entries:
        assert search.trails[length.length, length.ranks].cost_s == length.ttft_s
    return search.table


def losses(table: LookupTable, cluster: Cluster, lengths: list[int]) -> dict[int, float]:
    """Losses of TTFT at lengths that are not in the table, against searches there."""
    found = {}
    for length in lengths:
        split = table.lookup(length, cluster.num_ranks)
        best_s = min(
            best_split(length, cluster.num_ranks, cluster, min_stride=64, seeds=seeds).cost_s for seeds in ([], [split])
        )
        found[length] = simulated_cost(cluster)(split) / best_s - 1
    return found


@pytest.mark.parametrize("GBps", [1.25, 3, 12.5, 100])
@pytest.mark.sampled(2)
def test_left_out_lengths_lose_little(GBps: float) -> None:
    cluster = llama_cluster(4, GBps, compute=llama(num_layers=8))
    table = searched(cluster, LENGTHS)
    lengths = {entry.length for entry in table.entries}
    left_out = [round((a * b) ** 0.5) for a, b in pairwise(LENGTHS)] + [(a + 3 * b) // 4 for a, b in pairwise(LENGTHS)]
    found = losses(table, cluster, [length for length in left_out if length not in lengths])
    assert max(found.values()) < 0.013, (found, sorted(lengths))


def test_lengths_are_added_where_interpolation_loses_too_much() -> None:
    cluster = llama_cluster(4, 12.5, compute=llama(num_layers=8))
    far = [2048, 32768]
    as_given, filled = searched(cluster, far, max_loss=None), searched(cluster, far)
    assert {entry.length for entry in as_given.entries} == set(far)
    lengths = sorted({entry.length for entry in filled.entries})
    assert lengths[0] == far[0] and lengths[-1] == far[-1] and len(lengths) > 2
    # All numbers of ranks have them.
    assert [(entry.length, entry.ranks) for entry in filled.entries] == [(n, p) for n in lengths for p in (1, 4)]
    middle = [8000]
    assert max(losses(filled, cluster, middle).values()) < max(losses(as_given, cluster, middle).values())


def two_valleys(crossing: int, per_doubling: float) -> Cost:
    """Two ranks; 30% on the first is best for prompts up to a length, 70% for longer ones; 1 us per token at best."""

    def cost(partition: ContextPartition) -> float:
        share, beyond = partition.boundaries[1] / partition.num_tokens, log2(partition.num_tokens / crossing)
        low = abs(share - 0.3) + per_doubling * max(0.0, beyond)
        high = abs(share - 0.7) + per_doubling * max(0.0, -beyond)
        return 1e-6 * partition.num_tokens * (1 + min(low, high))

    return cost


@pytest.mark.parametrize("per_doubling", [0.001, 0.02, 0.1])
def test_where_the_best_valley_changes_no_length_is_between(
    monkeypatch: pytest.MonkeyPatch, per_doubling: float
) -> None:
    cost = two_valleys(5000, per_doubling)
    monkeypatch.setattr("partitioner.searches.evaluators.simulated_cost", lambda cluster: cost)
    cluster, lengths = llama_cluster(2, 100), [1024 * 2**i for i in range(5)]
    # Of an earlier search, so that this one finds both.
    known = [
        TableEntry(length=n, ranks=2, boundaries=(0, round(share * n), n), ttft_s=1.0, objective="modelled", date="")
        for n, share in zip(lengths, [0.3, 0.3, 0.3, 0.7, 0.7], strict=True)
    ]
    as_given, filled = (searched(cluster, lengths, known, max_loss=max_loss) for max_loss in (None, 0.01))

    def largest_loss(table: LookupTable) -> float:
        tried = [round(1024 * 16 ** (i / 200)) for i in range(201)]
        return max(cost(table.lookup(length, 2)) / (1e-6 * length) - 1 for length in tried)

    assert largest_loss(as_given) > 0.03
    assert largest_loss(filled) < 0.01
    last, first = sorted({entry.length for entry in filled.entries} - set(lengths))
    assert first == last + 1
    for entry in filled.entries_for(2):
        assert entry.ratios[0] == pytest.approx(0.3 if entry.length <= last else 0.7, abs=0.005)
        # What an entry gives up for its neighbours is little, here that and what the stride leaves.
        assert entry.ttft_s <= (1 + NEARLY_BEST + 0.001) * 1e-6 * entry.length


def test_the_ranks_that_idle_are_the_last_where_all_are_alike() -> None:
    # Hops are so slow that not all ranks are worth one.
    cluster = llama_cluster(6, 1, compute=llama(num_layers=2, step_s=2e-3))
    chunks = best_split(512, 6, cluster, min_stride=8).partition.chunk_lengths
    working = sum(chunk > 0 for chunk in chunks)
    assert 0 < working < 6
    assert all(chunk > 0 for chunk in chunks[:working])


def test_searching_twice_gives_the_same_table() -> None:
    cluster = llama_cluster(3, 3, compute=llama(num_layers=4))
    first, second = searched(cluster, LENGTHS[:2]), searched(cluster, LENGTHS[:2])
    assert [entry.boundaries for entry in first.entries] == [entry.boundaries for entry in second.entries]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (SearchMethod.seeded, [(0, 224, 416, 640, 1024), (0, 896, 1664, 2688, 4096)]),
        (SearchMethod.grid, [(0, 128, 384, 640, 1024), (0, 896, 1664, 2688, 4096)]),
    ],
)
def test_the_tables_of_both_strategies_are_the_recorded_ones(
    method: SearchMethod, expected: list[tuple[int, ...]]
) -> None:
    """Entries change only by a commit that means to: tables of users were searched by earlier versions."""
    cluster = llama_cluster(4, 12.5, compute=llama(num_layers=6))
    table = searched(cluster, [1024, 4096], method=method, max_loss=None)
    assert [entry.boundaries for entry in table.entries_for(4)] == expected


class SimulatedRanks:
    """Live ranks of a search, whose TTFT is simulated; counts prefills."""

    rank, num_stages = 0, 3

    def __init__(self) -> None:
        self.num_prefills = 0

    def on_rank_0(self, what: str, work: Callable[[], Any]) -> Any:
        return work()

    def live_cost(self, model: Any, ranks: Any, prefill: Any, num_tokens: int, **_: Any) -> Any:
        cluster, spread = llama_cluster(3, 12.5, compute=llama(num_layers=3)), dict[tuple[int, ...], float]()

        def cost(partition: ContextPartition) -> float:
            self.num_prefills += 1
            spread[partition.boundaries] = 0.01
            return simulate(partition, cluster).ttft_s

        cost.spread = spread  # type: ignore[attr-defined]
        return cost


@pytest.mark.parametrize("method", SearchMethod)
def test_a_live_search_that_was_stopped_goes_on_with_what_it_measured(
    method: SearchMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = SearchOptions(objective=Objective.measured, lengths=[512, 1024], method=method)
    run = SearchRun(table=str(tmp_path / "t.json"), search=search)
    clusters = {count: llama_cluster(count, 12.5, compute=llama(num_layers=3)) for count in (1, 2, 3)}

    def live_search(num_entries: int | None, **changes: Any) -> tuple[LookupTable, int]:
        """The table after this number of entries, and how many prefills it took."""
        ranks = SimulatedRanks()
        monkeypatch.setattr("partitioner.searches.evaluators.LiveCost", ranks.live_cost)
        with SearchProgress([], search, shown=False) as progress:
            options: Any = replace(run, search=replace(search, **changes))
            evaluator = LiveEvaluator(
                clusters, progress, run=options, ranks=ranks, model=None, fingerprint_key="this model"
            )  # type: ignore[arg-type]
            filled = TableSearch(LookupTable(FINGERPRINT, []), evaluator, search, progress)
            for _ in islice(filled.run(search.lengths), num_entries):
                pass
        return filled.table, ranks.num_prefills

    stopped, first = live_search(4)
    whole, second = live_search(None)
    again, none = live_search(None)
    forced, all_of_them = live_search(None, force=True)
    assert len(stopped.entries) == 4 and len(whole.entries) == 6
    assert first > 0 and second > 0 and none == 0 and all_of_them == first + second
    assert [entry.boundaries for entry in again.entries] == [entry.boundaries for entry in forced.entries]
    # All live ranks took part, those beyond an entry's with empty chunks; what is measured has a spread.
    assert {entry.spread for entry in forced.entries} == {0.01}
    assert forced.ranks() == [1, 2, 3]
