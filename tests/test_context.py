"""Chunks tile the prompt, in the order of the ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runahead.context import ContextPartition, even, from_ratios
from tests.partitions import boundaries

partitions = st.integers(1, 60).flatmap(
    lambda num_tokens: st.integers(1, 6).flatmap(lambda num_ranks: boundaries(num_tokens, num_ranks))
)


@st.composite
def ratios(draw: st.DrawFn) -> list[float]:
    """Shares that sum to 1, some of them 0."""
    weights = draw(
        st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1.0)), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)
    )
    return [weight / sum(weights) for weight in weights]


class TestContextPartition:
    @given(bounds=partitions)
    def test_every_token_is_in_the_chunk_of_one_rank(self, bounds: tuple[int, ...]) -> None:
        partition = ContextPartition(boundaries=bounds)
        for token in range(partition.num_tokens):
            holders = [rank for rank in range(partition.num_ranks) if token in partition.chunk(rank)]
            assert len(holders) == 1

    @given(bounds=partitions)
    def test_chain_is_the_ranks_with_tokens_in_order(self, bounds: tuple[int, ...]) -> None:
        partition = ContextPartition(boundaries=bounds)
        assert partition.chain == [rank for rank in range(partition.num_ranks) if len(partition.chunk(rank)) > 0]
        assert sum(partition.chunk_lengths) == partition.num_tokens
        tokens = [token for rank in partition.chain for token in partition.chunk(rank)]
        assert tokens == list(range(partition.num_tokens))

    @pytest.mark.parametrize("bounds", [(), (0,), (1, 5), (0, 3, 2), (0, -1, 4)])
    def test_boundaries_start_at_0_and_do_not_decrease(self, bounds: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="context partition"):
            ContextPartition(boundaries=bounds)

    def test_partition_of_other_ranks_or_tokens_is_refused_with_both_numbers(self) -> None:
        partition = ContextPartition(boundaries=(0, 3, 5, 9))
        assert partition.check(9, 3) is partition
        with pytest.raises(ValueError, match="has 3 chunks but the chain has 4 stages; give each stage .* one chunk"):
            partition.check(9, 4)
        with pytest.raises(ValueError, match="covers 9 tokens but the prompt has 10"):
            partition.check(10, 3)


class TestEven:
    @given(num_tokens=st.integers(1, 10_000), num_ranks=st.integers(1, 20))
    def test_lengths_differ_by_one_token_at_most(self, num_tokens: int, num_ranks: int) -> None:
        partition = even(num_tokens, num_ranks).check(num_tokens, num_ranks)
        assert max(partition.chunk_lengths) - min(partition.chunk_lengths) <= 1


class TestFromRatios:
    @given(shares=ratios(), num_tokens=st.integers(1, 100_000))
    def test_lengths_are_the_shares_to_one_token(self, shares: list[float], num_tokens: int) -> None:
        partition = from_ratios(shares)(num_tokens, len(shares)).check(num_tokens, len(shares))
        for share, length in zip(shares, partition.chunk_lengths, strict=True):
            assert abs(length - share * num_tokens) <= 1
            assert share > 0 or length == 0

    @given(shares=ratios(), num_tokens=st.integers(1, 1000))
    def test_shares_that_sum_to_1_roughly_still_cover_all_tokens(self, shares: list[float], num_tokens: int) -> None:
        rounded = [round(share, 4) for share in shares]
        assert from_ratios(rounded)(num_tokens, len(shares)).num_tokens == num_tokens

    @pytest.mark.parametrize(
        "shares", [[], [0.5, 0.6], [0.5, 0.4], [-0.1, 1.1], [math.nan, 1.0], [math.inf, 0.0], [0.0, 0.0]]
    )
    def test_shares_are_parts_of_1(self, shares: list[float]) -> None:
        with pytest.raises(ValueError, match="must be shares in \\[0, 1\\], one per rank, that sum to 1"):
            from_ratios(shares)

    def test_one_share_per_rank(self) -> None:
        with pytest.raises(ValueError, match="has 2 shares for 3 ranks; use --nproc-per-node 2"):
            from_ratios([0.5, 0.5])(10, 3)

    def test_one_share_per_stage_of_several_ranks(self) -> None:
        with pytest.raises(ValueError, match="has 2 shares for 3 stages of 4 ranks; use --nproc-per-node 8"):
            from_ratios([0.5, 0.5], ranks_per_stage=4)(10, 3)
        with pytest.raises(ValueError, match="one per stage, that sum to 1"):
            from_ratios([0.5, 0.6], ranks_per_stage=4)
