"""The simulated pipeline: by its recurrence and closed forms, its bytes, and chunks as they are searched."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.searches.best_split import best_chunks
from partitioner.searches.equal_work import dynamic_chunks, equal_work
from partitioner.simulation.chain import simulate
from partitioner.simulation.pipeline import simulate_pipeline
from runahead.context import ContextPartition, even
from tests.examples import examples
from tests.partitioner.clusters import llama, llama_cluster, partitions, random_clusters, random_hybrids

HIDDEN_BYTES = 4096 * 2


def split(*boundaries: int) -> ContextPartition:
    return ContextPartition(boundaries=boundaries)


def pipeline(chunks, num_ranks, cluster):
    return simulate_pipeline(chunks, num_ranks, cluster, activation_bytes=HIDDEN_BYTES)


@given(st.one_of(random_clusters(3), random_hybrids(3)))
def test_one_rank_with_one_chunk_takes_what_a_chain_of_one_takes(cluster):
    expected = simulate(split(0, 1000, 1000, 1000), cluster).ttft_s
    assert pipeline(split(0, 1000), 1, cluster).ttft_s == pytest.approx(expected, rel=1e-9)


@examples(40)
@given(random_clusters(3), partitions(4), st.integers(1, 3))
def test_agrees_with_the_longest_path(cluster, boundaries, num_ranks):
    # Another telling: the longest path through a grid of (rank, chunk), by recursion from the end.
    num_ranks = min(num_ranks, cluster.compute.num_places)
    chunks = split(*boundaries)
    lengths = [chunks.chunk(number) for number in chunks.chain]
    compute, speed, L = cluster.compute, cluster.speed, cluster.compute.num_places
    bounds = [L * rank // num_ranks for rank in range(num_ranks + 1)]

    def seconds(rank, number):
        c, P, total = len(lengths[number]), lengths[number].start, 0.0
        for layer in range(bounds[rank], bounds[rank + 1]):
            total += compute.first(c) if layer == 0 else 0.0
            if layer < L - 1:
                total += compute.own(c) + compute.prefix(c, P) + compute.between(c)
            elif number == len(lengths) - 1:
                total += compute.own(c) + compute.prefix(c, P) + compute.last(c)
        return total / speed[rank]

    def wire(rank, number):
        return len(lengths[number]) * HIDDEN_BYTES / cluster.links.between(rank, rank + 1).bandwidth_Bps

    def done(rank, number):
        if number < 0:
            return 0.0
        arrived = left(rank - 1, number) + cluster.links.between(rank - 1, rank).latency_s if rank else 0.0
        return max(done(rank, number - 1), arrived) + seconds(rank, number)

    def left(rank, number):
        return 0.0 if number < 0 else max(left(rank, number - 1), done(rank, number)) + wire(rank, number)

    expected = done(num_ranks - 1, len(lengths) - 1)
    assert pipeline(chunks, num_ranks, cluster).ttft_s == pytest.approx(expected, rel=1e-9)


@given(random_clusters(4), partitions(5))
def test_hidden_states_are_sent_once_per_boundary(cluster, boundaries):
    num_ranks = min(4, cluster.compute.num_places)
    result = pipeline(split(*boundaries), num_ranks, cluster)
    assert result.sent_bytes == [4096 * HIDDEN_BYTES] * (num_ranks - 1) + [0] * (5 - num_ranks)
    end_s = result.compute_s[num_ranks - 1] + result.wait_s[num_ranks - 1]
    assert result.ttft_s == pytest.approx(end_s, rel=1e-9)


def test_fills_in_the_time_of_p_minus_1_chunks():
    # Chunks of equal time on p ranks of equal layers: (m + p - 1) steps, so a share (p - 1) / m beyond perfect.
    cluster = llama_cluster(4, None, compute=llama(step_s=0.0))
    one_s = simulate(split(0, 0, 0, 0, 16384), cluster).ttft_s
    one_s += cluster.compute.between(16384) - cluster.compute.first(16384)  # of the last layer for all tokens
    for number in (8, 32):
        chunks = equal_work(16384, number, cluster.compute)
        assert pipeline(chunks, 4, cluster).ttft_s == pytest.approx(one_s / 4 * (1 + 3 / number), rel=0.02)


def test_traffic_does_not_grow_with_keys_and_values():
    cluster = llama_cluster(8, 1)
    chunks = even(16384, 64)
    thin = replace(cluster, kv_bytes_per_token=cluster.kv_bytes_per_token / 8)
    assert pipeline(chunks, 8, thin) == pipeline(chunks, 8, cluster)
    # On a link where keys and values take longer than compute, the pipeline is far ahead of the chain.
    assert pipeline(chunks, 8, cluster).ttft_s < 0.6 * simulate(even(16384, 8), cluster).ttft_s


@pytest.mark.parametrize("GBps", [None, 1])
def test_searched_chunks_are_no_worse_than_even_and_dynamic_ones(GBps):
    cluster = llama_cluster(4, GBps)
    found = best_chunks(16384, 4, cluster, activation_bytes=HIDDEN_BYTES, min_stride=64, max_evaluations=200)
    assert found.partition.num_tokens == 16384
    assert found.cost_s == pipeline(found.partition, 4, cluster).ttft_s
    for number in (4, 8, 16, 32):
        assert found.cost_s <= pipeline(even(16384, number), 4, cluster).ttft_s
    for first in (512, 1024, 4096):
        dynamic = dynamic_chunks(16384, first, cluster.compute)
        assert found.cost_s <= 1.005 * pipeline(dynamic, 4, cluster).ttft_s


def test_dynamic_chunks_take_equally_long():
    cost = llama(attention_flops=20e12, step_s=0.0)
    chunks = dynamic_chunks(32768, 4096, cost, smooth=1.0, multiple=1)
    lengths = chunks.chunk_lengths
    assert lengths[0] == 4096 and lengths[:-1] == sorted(lengths[:-1], reverse=True) and lengths[-2] < 3000
    for number in range(len(lengths) - 1):
        chunk = chunks.chunk(number)
        if len(chunk) == 1024:  # a quarter of the first one, of which none has less
            continue
        seconds = cost.between(len(chunk)) + cost.own(len(chunk)) + cost.prefix(len(chunk), chunk.start)
        assert seconds == pytest.approx(cost.between(4096) + cost.own(4096), rel=2e-3)
    fixed = dynamic_chunks(32768, 4096, cost, smooth=0.0)
    assert fixed == even(32768, 8)
    least = dynamic_chunks(2**20, 4096, cost, smooth=1.0)
    assert min(least.chunk_lengths[:-1]) == 1024


def test_wrong_numbers_are_refused():
    cluster = llama_cluster(64, 10)
    with pytest.raises(ValueError, match="32 layers cannot be shared out to 64 ranks"):
        pipeline(even(4096, 8), 64, cluster)
    with pytest.raises(ValueError, match="65 ranks were asked for"):
        pipeline(even(4096, 8), 65, cluster)
    with pytest.raises(ValueError, match="chunks from 32 tokens on"):
        dynamic_chunks(4096, 32, cluster.compute)
