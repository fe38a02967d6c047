"""A table found by simulation: lookups between its lengths are nearly as good as searches there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from partitioner.cluster import Cluster
from partitioner.lookup_table import LookupTable
from partitioner.options import Objective, SearchOptions
from partitioner.planning import best_split, simulated_cost
from partitioner.search_progress import SearchProgress
from partitioner.simulated_search import SimulatedSearch
from tests.partitioner.clusters import llama, llama_cluster
from tests.partitioner.test_lookup_table import FINGERPRINT

LENGTHS = [2048, 4096, 8192, 16384]


def searched(cluster: Cluster, lengths: list[int], **changes: object) -> LookupTable:
    options = SearchOptions(objective=Objective.modelled, min_stride=64, **changes)  # type: ignore[arg-type]
    with SearchProgress([], options, shown=False) as progress:
        search = SimulatedSearch(
            LookupTable(FINGERPRINT, []), {1: cluster.permuted([0]), cluster.num_ranks: cluster}, options, progress
        )
        for _ in search.run(lengths):
            pass
    for length in search.table.entries:
        assert search.trails[length.length, length.ranks].cost_s == length.ttft_s
    return search.table


def losses(table: LookupTable, cluster: Cluster, lengths: list[int]) -> dict[int, float]:
    """Of TTFT at lengths that are not in the table, against searches there."""
    found = {}
    for length in lengths:
        split = table.lookup(length, cluster.num_ranks)
        best_s = min(
            best_split(length, cluster.num_ranks, cluster, min_stride=64, seeds=seeds).cost_s for seeds in ([], [split])
        )
        found[length] = simulated_cost(cluster)(split) / best_s - 1
    return found


@pytest.mark.parametrize("GBps", [1.25, 3, 12.5, 100])
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
