"""Search for the prompt length at which the best split changes from one valley (local minimum) of TTFT to another.

A table with the split of one valley at this length, and that of the other at the next length, interpolates only
between splits of one valley, since no prompt length is between the two.
"""

from __future__ import annotations

from collections.abc import Callable

from partitioner.searches.evaluations import Cost, SearchResult
from partitioner.table.entry import scaled
from runahead.context import ContextPartition

EQUAL = 0.0005
"""Share within which TTFTs count as equal: then it does not matter at which length exactly they cross."""


def valley_change(
    cost: Cost,
    search_near: Callable[[ContextPartition], SearchResult],
    shorter: ContextPartition,
    longer: ContextPartition,
    between: int,
    *,
    best_s: float,
    max_loss: float,
) -> tuple[ContextPartition, ContextPartition] | None:
    """Find two lengths, one token apart, between which the best split changes from one valley to another.

    Both valleys are followed towards each other to where their TTFTs cross, by bisection.

    Args:
        search_near: finds the best split near a given one, of the same length.
        shorter, longer: splits of two lengths, one per valley; returned as they are if their valleys end there.
        between: the length to evaluate first, where lookups lose.
        best_s: the best TTFT known for that length.
        max_loss: splits are in one valley if the TTFT halfway between them exceeds theirs by at most this share.

    Returns:
        The splits of the two lengths. None if both are in one valley, or both exceed `best_s` by `max_loss`.
    """

    def followed(length: int) -> tuple[SearchResult, SearchResult]:
        return search_near(scaled(shorter, length)), search_near(scaled(longer, length))

    low, high = followed(between)
    ends = ((a + b) // 2 for a, b in zip(low.partition.boundaries, high.partition.boundaries, strict=True))
    halfway_s = cost(ContextPartition(boundaries=tuple(ends)))
    if halfway_s <= (1 + max_loss) * max(low.cost_s, high.cost_s):
        return None
    if min(low.cost_s, high.cost_s) > (1 + max_loss) * best_s:
        return None
    while True:
        if abs(low.cost_s / high.cost_s - 1) <= EQUAL and between + 1 < longer.num_tokens:
            return low.partition, scaled(high.partition, between + 1)
        if low.cost_s <= high.cost_s:
            shorter = low.partition
        else:
            longer = high.partition
        if longer.num_tokens - shorter.num_tokens == 1:
            return shorter, longer
        between = (shorter.num_tokens + longer.num_tokens) // 2
        low, high = followed(between)
