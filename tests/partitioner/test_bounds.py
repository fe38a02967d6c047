"""The paper's formulas, and its worked example (Sec. 4.1: 9 tokens, 3 ranks, chunks of 4, 3 and 2)."""

import pytest
from hypothesis import given

from partitioner.simulation.bounds import chain_tokens, tsp_tokens, ttft_star
from runahead.config import Attention
from runahead.context import ContextPartition, even
from tests.partitioner.clusters import partitions

WORKED = ContextPartition(boundaries=(0, 4, 7, 9))


def test_worked_example_of_the_paper():
    # The paper counts keys and values separately: 36 and 22.
    assert 2 * tsp_tokens(9, 3) == 36
    assert 2 * chain_tokens(WORKED) == 22


def test_even_chunks_halve_the_traffic():
    for num_ranks in (1, 2, 3, 4, 8):
        assert chain_tokens(even(480, num_ranks)) == tsp_tokens(480, num_ranks) / 2


def test_dense_attention_scales_better_than_its_ranks():
    assert ttft_star(1.0, 1, Attention.dense) == 1
    assert 1 / ttft_star(1.0, 2, Attention.dense) == pytest.approx(8 / 3)
    assert [ttft_star(6.0, p, Attention.causal) for p in (1, 2, 3)] == [6, 3, 2]
    with pytest.raises(ValueError, match="at least 1"):
        ttft_star(1.0, 0, Attention.dense)


def test_even_chunks_balance_reach_the_dense_bound_on_average():
    # Eq. 1: each rank multiplies its chunk's queries with all keys up to its end; in all that is C^2 / 2 (1 + 1/p).
    for num_ranks in (2, 4, 8):
        chunks = [even(960, num_ranks).chunk(rank) for rank in range(num_ranks)]
        average = sum(len(chunk) * chunk.stop for chunk in chunks) / num_ranks
        assert average == pytest.approx(ttft_star(960.0**2, num_ranks, Attention.dense))


@given(partitions(4))
def test_idle_ranks_send_nothing(boundaries):
    partition = ContextPartition(boundaries=boundaries)
    working = [boundaries[0], *(boundaries[rank + 1] for rank in partition.chain)]
    assert chain_tokens(partition) == chain_tokens(ContextPartition(boundaries=tuple(working)))
