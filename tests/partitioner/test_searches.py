"""Both searches find what trying everything finds, in far fewer evaluations, and stop when told."""

import random
from functools import partial
from itertools import combinations_with_replacement, pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.options import SearchMethod
from partitioner.searches import STRATEGIES
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, Evaluation, SearchResult, SearchTask
from partitioner.simulation.chain import simulate
from runahead.context import ContextPartition, even
from tests.examples import examples
from tests.partitioner.clusters import llama_cluster, random_cluster


def searched_by(
    method: SearchMethod,
    cost: Cost,
    num_tokens: int,
    num_ranks: int,
    seed: ContextPartition | None = None,
    **limits: Any,
) -> SearchResult:
    return STRATEGIES[method].search(cost, SearchTask(num_tokens=num_tokens, num_ranks=num_ranks, **limits), seed)


grid_search, seeded_search = (partial(searched_by, method) for method in (SearchMethod.grid, SearchMethod.seeded))
SEARCHES = [grid_search, seeded_search]
STRIDE = 256


def everything(cost: Cost, num_tokens: int, num_ranks: int) -> float:
    """The cheapest of all partitions on multiples of the stride, empty chunks included."""
    places = range(0, num_tokens + 1, STRIDE)
    return min(
        cost(ContextPartition(boundaries=(0, *inner, num_tokens)))
        for inner in combinations_with_replacement(places, num_ranks - 1)
    )


def bowl(*bottom: int) -> Cost:
    """A cost with one minimum."""
    return lambda partition: 1 + sum((a - b) ** 2 for a, b in zip(partition.boundaries[1:-1], bottom, strict=True))


@pytest.mark.parametrize(("num_ranks", "num_tokens", "draws"), [(2, 8192, 30), (3, 8192, 30), (4, 4096, 26)])
@pytest.mark.slow
def test_both_are_within_one_percent_of_trying_everything(num_ranks, num_tokens, draws):
    rng = random.Random(num_ranks)
    excess: dict[str, list[float]] = {"grid": [], "seeded": []}
    evaluations: dict[str, list[int]] = {"grid": [], "seeded": []}
    for _ in range(draws):
        cluster = random_cluster(rng, num_ranks, num_layers=6)

        def cost(partition: ContextPartition, cluster=cluster) -> float:
            return simulate(partition, cluster).ttft_s

        best_s = everything(cost, num_tokens, num_ranks)
        seed = equal_work(num_tokens, num_ranks, cluster.compute, cluster.speed)
        for name, search in (("grid", grid_search), ("seeded", partial(seeded_search, seed=seed))):
            result = search(cost, num_tokens, num_ranks, min_stride=STRIDE)
            assert result.cost_s == cost(result.partition)
            excess[name].append(result.cost_s / best_s - 1)
            evaluations[name].append(result.num_evaluations)
    assert max(excess["grid"]) < 0.01, excess["grid"]
    assert max(excess["seeded"]) < 0.01, excess["seeded"]
    if num_ranks > 2:  # the binary search of two ranks leaves nothing to save
        assert median(evaluations["seeded"]) < 0.6 * median(evaluations["grid"]), evaluations


def test_the_grids_of_the_papers_figure():
    # Fig. 6 (b-d): 96 tokens, boundaries [0, 32 + d1, 64 + d2, 96], strides 8, 4, 2, ...; the best is [0, 28, 70, 96].
    result = grid_search(bowl(28, 70), 96, 3, min_stride=1, leave_out=False)
    assert result.partition.boundaries == (0, 28, 70, 96)
    first = {step.boundaries[1:-1] for step in result.trail if step.level == 0}
    # 5 x 5 around the even boundaries, less the one point at which both boundaries meet.
    assert first == {(32 + a, 64 + b) for a in range(-16, 17, 8) for b in range(-16, 17, 8)} - {(48, 48)}
    assert list(dict.fromkeys(step.stride for step in result.trail)) == [8, 4, 2, 1]
    assert result.num_evaluations == len(result.trail) < 120


def test_two_ranks_as_in_the_papers_figure():
    # Fig. 6 (a): 16,384 tokens of Llama 7B on two A100s: [0, 9728, 16384].
    cluster = llama_cluster(2, 300)
    result = grid_search(lambda partition: simulate(partition, cluster).ttft_s, 16384, 2, min_stride=512)
    assert result.partition.boundaries == (0, 9728, 16384)
    assert result.num_evaluations <= 12


@given(
    bottom=st.integers(0, 10_000),
    stride=st.integers(1, 700),
    num_tokens=st.integers(1, 10_000),
)
def test_golden_section_finds_the_minimum_of_a_curve(bottom, stride, num_tokens):
    cost = bowl(bottom)
    result = grid_search(cost, num_tokens, 2, min_stride=stride)
    boundaries = [*range(0, num_tokens, stride), num_tokens]
    assert result.cost_s == min(cost(ContextPartition(boundaries=(0, b, num_tokens))) for b in boundaries)


@pytest.mark.parametrize("search", SEARCHES)
@examples(40)
@given(
    num_ranks=st.integers(1, 5),
    num_tokens=st.integers(1, 3000),
    stride=st.integers(1, 700),
    data=st.data(),
)
def test_results_are_partitions_on_the_stride(search, num_ranks, num_tokens, stride, data):
    bottom = sorted(data.draw(st.lists(st.integers(0, num_tokens), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    seen: list[Evaluation] = []
    result: SearchResult = search(
        bowl(*bottom), num_tokens, num_ranks, min_stride=stride, max_evaluations=200, on_evaluation=seen.append
    )
    assert result.partition.check(num_tokens, num_ranks)
    on_stride = all(b % stride == 0 or b == num_tokens for b in result.partition.boundaries)
    assert on_stride or result.partition == even(num_tokens, num_ranks)  # the seed itself, off the stride
    assert seen == result.trail
    assert len({step.boundaries for step in seen}) == len(seen) == result.num_evaluations
    bests = [step.cost_s for step in seen if step.is_best]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == result.cost_s == min(step.cost_s for step in seen)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_stops_with_the_best_so_far(search):
    full = search(bowl(100, 900), 1024, 3, min_stride=8)
    stopped = search(bowl(100, 900), 1024, 3, min_stride=8, max_evaluations=10)
    assert stopped.trail == full.trail[:10]
    assert stopped.num_evaluations == 10
    assert stopped.cost_s == min(step.cost_s for step in stopped.trail) > full.cost_s


@pytest.mark.parametrize("search", SEARCHES)
def test_a_slow_rank_gets_fewer_tokens(search):
    for slow in range(3):
        cluster = llama_cluster(3, 300, speed=[0.5 if rank == slow else 1.0 for rank in range(3)])

        def cost(partition: ContextPartition, cluster=cluster) -> float:
            return simulate(partition, cluster).ttft_s

        lengths = search(cost, 8192, 3, min_stride=64).partition.chunk_lengths
        assert lengths[slow] == min(lengths)
        assert lengths[slow] < 0.7 * min(length for rank, length in enumerate(lengths) if rank != slow)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_hopeless_rank_is_left_out(search):
    cluster = llama_cluster(4, 300, speed=[1.0, 0.01, 1.0, 1.0])

    def cost(partition: ContextPartition) -> float:
        return simulate(partition, cluster).ttft_s

    assert search(cost, 4096, 4, min_stride=128).partition.chain == [0, 2, 3]
    assert search(cost, 4096, 4, min_stride=128, leave_out=False).partition.chain == [0, 1, 2, 3]


def test_on_slow_links_the_last_rank_gets_most():
    cluster = llama_cluster(4, 1)
    cost = partial(lambda partition: simulate(partition, cluster).ttft_s)
    lengths = seeded_search(cost, 16384, 4, min_stride=64).partition.chunk_lengths
    assert lengths[-1] == max(lengths)


def test_reach_bounds_the_boundaries():
    seed = ContextPartition(boundaries=(0, 400, 800, 1200))
    result = seeded_search(bowl(40, 1100), 1200, 3, min_stride=10, seed=seed, reach=100, leave_out=False)
    assert result.partition.boundaries == (0, 300, 900, 1200)
    for step in result.trail:
        assert all(abs(a - b) <= 100 for a, b in zip(step.boundaries, seed.boundaries, strict=True))


def test_a_seed_is_kept_where_nothing_on_the_stride_is_cheaper():
    seed = ContextPartition(boundaries=(0, 333, 777, 1000))
    result = seeded_search(bowl(333, 777), 1000, 3, min_stride=100, seed=seed)
    assert result.partition == seed
    assert result.trail[0].boundaries == seed.boundaries


def test_a_good_seed_saves_evaluations():
    cluster = llama_cluster(8, 300)
    cost = partial(lambda partition: simulate(partition, cluster).ttft_s)
    seeded = partial(seeded_search, cost, 8192, 8, min_stride=64, leave_out=False)
    near, far = seeded(seed=equal_work(8192, 8, cluster.compute)), seeded(seed=even(8192, 8))
    assert near.num_evaluations < far.num_evaluations
    assert near.cost_s <= far.cost_s


def test_ranks_that_work_keep_working_without_leaving_out():
    # The bottom is a partition with an empty chunk; without leave_out every rank keeps at least one stride.
    for search in SEARCHES:
        kept = search(bowl(500, 500), 1000, 3, min_stride=50, leave_out=False).partition
        assert all(a < b for a, b in pairwise(kept.boundaries))
        assert search(bowl(500, 500), 1000, 3, min_stride=50).partition.boundaries == (0, 500, 500, 1000)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "options", "sentence"),
    [
        (0, 2, {"min_stride": 1}, "search.lengths must be at least 1"),
        (10, 0, {"min_stride": 1}, "search.ranks=0 must be at least 1"),
        (10, 2, {"min_stride": 0}, "search.min_stride=0 must be at least 1"),
        (10, 2, {"min_stride": 1, "max_evaluations": 0}, "search.max_evaluations=0 must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(search, num_tokens, num_ranks, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        search(bowl(5), num_tokens, num_ranks, **options)


def test_a_grid_over_many_ranks_names_the_other_method():
    with pytest.raises(ValueError, match=r"5\^7 splits per level .* use search.method=seeded"):
        grid_search(bowl(*range(1, 8)), 64, 8, min_stride=1)


def test_a_seed_must_fit():
    with pytest.raises(ValueError, match="has 2 chunks but the chain has 3 stages"):
        seeded_search(bowl(1, 2), 10, 3, min_stride=1, seed=even(10, 2))
    with pytest.raises(ValueError, match="covers 9 tokens but the prompt has 10"):
        seeded_search(bowl(1, 2), 10, 3, min_stride=1, seed=even(9, 3))
    with pytest.raises(ValueError, match="search.reach=1 must be at least search.min_stride=2"):
        seeded_search(bowl(1, 2), 10, 3, min_stride=2, reach=1)
