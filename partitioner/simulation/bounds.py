"""The paper's bound of TTFT, and its counts of tokens sent (Eq. 1-7)."""

from __future__ import annotations

from runahead.config import Attention
from runahead.context import ContextPartition


def ttft_star(ttft_one_s: float, num_ranks: int, attention: Attention) -> float:
    """Lower bound TTFT*(p) for a long prompt: attention takes all the time, in perfect balance, and sending none.

    Dense (Eq. 1-3): TTFT(1) = a C^2, and p chunks leave out the blocks above the diagonal, so
    TTFT*(p) = TTFT(1) / 2 (1/p + 1/p^2): more than p times as fast. Causal: one rank leaves them out as well, so
    TTFT*(p) = TTFT(1) / p.

    Raises:
        ValueError: fewer than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"a bound for {num_ranks} ranks does not exist; use at least 1")
    if attention is Attention.causal:
        return ttft_one_s / num_ranks
    return ttft_one_s / 2 * (1 / num_ranks + 1 / num_ranks**2)


def tsp_tokens(num_tokens: int, num_ranks: int) -> int:
    """Tokens whose KV are sent in one layer, by all ranks together, if each sends its share to all others (Eq. 4-5)."""
    return (num_ranks - 1) * num_tokens


def streamed_tokens(partition: ContextPartition, num_seen: int) -> int:
    """Tokens whose KV of a streaming head are sent in one layer along a chain: each rank receives at most so many.

    Args:
        num_seen: first tokens and last ones before its own that a query of such a head sees.
    """
    return sum(min(partition.boundaries[rank + 1], num_seen) for rank in partition.chain[:-1])


def chain_tokens(partition: ContextPartition) -> int:
    """Tokens whose KV are sent in one layer along a chain: the sum of the inner boundaries, since rank i sends on the
    prefix of rank i + 1. Direct transfer gives the same sum in another order: chunk i goes to all later ranks.
    """
    chain = partition.chain
    return sum(partition.boundaries[rank + 1] for rank in chain[:-1])
