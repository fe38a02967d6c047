"""Equal work: every rank's layers take equally long."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.cost.compute import layer_s
from partitioner.cost.fitted import FittedCost
from partitioner.searches.best_split import practical_bound
from partitioner.searches.equal_work import equal_work
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from tests.partitioner.clusters import llama, llama_cluster, random_cluster


@given(seed=st.integers(0, 10**6), num_ranks=st.integers(1, 8), num_tokens=st.integers(2000, 200_000))
def test_layers_take_all_ranks_equally_long(seed, num_ranks, num_tokens):
    cluster = random_cluster(random.Random(seed), num_ranks, 4)
    partition = equal_work(num_tokens, num_ranks, cluster.compute, cluster.speed)
    assert partition.num_ranks == num_ranks
    assert partition.num_tokens == num_tokens
    chunks = [partition.chunk(rank) for rank in range(num_ranks)]
    seconds = [
        layer_s(cluster.compute, len(chunk), chunk.start) / speed
        for chunk, speed in zip(chunks, cluster.speed, strict=True)
    ]
    token_s = [
        (layer_s(cluster.compute, len(chunk) + 1, chunk.start + 1) / speed - each_s)
        for chunk, speed, each_s in zip(chunks, cluster.speed, seconds, strict=True)
    ]
    # Boundaries are whole tokens: up to one more or less at both ends of a chunk.
    assert max(seconds) - min(seconds) <= 2 * max(token_s) + 1e-12


def test_linear_work_is_shared_by_speed():
    linear = FittedCost(
        num_places=2,
        first_s=(0, 1e-6),
        between_s=(0, 1e-6),
        own_s=(0, 0, 0),
        prefix_s=(0, 0, 0, 0),
        last_s=(0, 0),
    )
    assert equal_work(900, 3, linear).boundaries == (0, 300, 600, 900)
    assert equal_work(900, 3, linear, [1.0, 0.25, 0.25]).boundaries == (0, 600, 750, 900)


def test_quadratic_work_solves_the_quadratic():
    # Causal attention alone: c1^2 / 2 = c2 (c1 + c2 / 2), hence c1 = C / sqrt(2).
    attention = FittedCost(
        num_places=2,
        first_s=(0, 0),
        between_s=(0, 0),
        own_s=(0, 0, 0.5e-9),
        prefix_s=(0, 0, 0, 1e-9),
        last_s=(0, 0),
    )
    assert equal_work(100_000, 2, attention).boundaries[1] == round(100_000 / 2**0.5)


def test_earlier_ranks_get_more():
    lengths = equal_work(16384, 8, llama()).chunk_lengths
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.5 * lengths[-1]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_it_is_close_to_the_best_where_communication_is_free(num_ranks):
    cluster: Cluster = llama_cluster(num_ranks, None)
    balanced_s = simulate(equal_work(16384, num_ranks, cluster.compute), cluster).ttft_s
    assert balanced_s <= 1.01 * practical_bound(16384, num_ranks, cluster, min_stride=32).cost_s


def test_a_prompt_shorter_than_its_ranks_leaves_some_idle():
    partition = equal_work(3, 8, llama())
    assert partition.num_tokens == 3
    assert partition.num_ranks == 8


@pytest.mark.parametrize("args", [(0, 2, None), (10, 0, None), (10, 2, [1.0])])
def test_wrong_numbers_are_refused(args):
    num_tokens, num_ranks, speed = args
    with pytest.raises(ValueError, match="cannot be split"):
        equal_work(num_tokens, num_ranks, llama(), speed)
