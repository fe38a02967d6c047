"""The best number of ranks and their order: the paper's Appendix B, and what unlike ranks add."""

from itertools import pairwise

import pytest

from benchmarks.ttft import bounds
from partitioner.cost.link import Link, Links
from partitioner.searches.best_split import best_split, best_splits, practical_bound
from partitioner.simulation.chain import simulate
from runahead.context import ContextPartition, even
from tests.partitioner.clusters import llama, llama_cluster

LENGTHS = (1024, 2048, 4096, 16384)
# The paper's bandwidths, 1 and 10 being those of App. B, and one that is too low for anything; 1e9 bytes per second.
BANDWIDTHS = (0.1, 1, 10, 300)


@pytest.mark.slow
def test_more_ranks_win_with_longer_prompts_and_more_bandwidth():
    best = {}
    for GBps in BANDWIDTHS:
        # Steps of 200 us: an eager forward of a short chunk is bound by launching its kernels.
        links = Links(8, Link.from_GBps(GBps, latency_s=50e-6))
        cluster = llama_cluster(8, None, compute=llama(step_s=200e-6), links=links)
        best[GBps] = []
        for length in LENGTHS:
            splits = {count: best_split(length, count, cluster, min_stride=length // 64) for count in (1, 2, 4, 8)}
            best_s = min(split.cost_s for split in splits.values())
            best[GBps].append(next(count for count, split in splits.items() if split.cost_s <= 1.05 * best_s))
    for along_lengths in best.values():
        assert along_lengths == sorted(along_lengths), best
    for slower, faster in pairwise(BANDWIDTHS):
        assert all(a <= b for a, b in zip(best[slower], best[faster], strict=True)), best
    assert best[0.1][0] == best[1][0] == 1
    assert best[300] == [8, 8, 8, 8]
    # Neither one rank nor all of them is the answer everywhere in between.
    assert {2, 4} & set(best[1] + best[10])


def test_even_chunks_on_more_ranks_are_slower_at_low_bandwidth():
    # App. B: 2k tokens at 10 GB/s take 0.16 s on 2 GPUs and 0.19 s on 4; at 1 GB/s one GPU is faster than either.
    even_s = {
        GBps: [simulate(even(2048, count), llama_cluster(count, GBps)).ttft_s for count in (1, 2, 4)]
        for GBps in (1, 10, 300)
    }
    assert even_s[1][0] < even_s[1][1] < even_s[1][2]
    assert even_s[10][1] < even_s[10][0]
    assert even_s[300][0] > even_s[300][1] > even_s[300][2]
    # Doubling the ranks gains less and less as bandwidth falls.
    gains = [even_s[GBps][1] / even_s[GBps][2] for GBps in (1, 10, 300)]
    assert gains == sorted(gains)


def test_every_number_of_ranks_has_its_best_split():
    splits = best_splits(4096, llama_cluster(3, 10), min_stride=128)
    assert list(splits) == [1, 2, 3]
    assert all(split.partition.num_ranks == count for count, split in splits.items())


def test_of_equals_the_fewest_ranks_win():
    # One token cannot be split.
    assert bounds.searched(1, llama_cluster(4, None)).boundaries == (0, 1, 1, 1, 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_practical_bound_bounds_every_split(num_ranks):
    bound_s = practical_bound(8192, num_ranks, llama_cluster(num_ranks, 10), min_stride=64).cost_s
    for GBps in (1, 10, 300):
        cluster = llama_cluster(num_ranks, GBps)
        searched = best_split(8192, num_ranks, cluster, min_stride=64)
        assert bound_s <= searched.cost_s * 1.001  # each was searched
        assert searched.cost_s <= simulate(even(8192, num_ranks), cluster).ttft_s
    # The paper's KVR-S is within 17% of TTFT(p) on its fast network.
    assert searched.cost_s < 1.17 * bound_s


def test_splits_can_be_seeded_with_known_ones():
    cluster = llama_cluster(2, 1)
    known = best_split(8192, 2, cluster, min_stride=64).partition
    doubled = ContextPartition(boundaries=tuple(2 * boundary for boundary in known.boundaries))
    seeded = best_split(16384, 2, cluster, min_stride=128, seeds=[doubled])
    assert seeded.trail[0].boundaries == doubled.boundaries
    assert seeded.cost_s <= simulate(doubled, cluster).ttft_s


def test_more_ranks_than_there_are_is_refused():
    with pytest.raises(ValueError, match="search.ranks=3 must be 1 to 2"):
        best_split(100, 3, llama_cluster(2, 10), min_stride=1)
