"""Where the best split changes from one valley of TTFT to another, as prompts get longer.

A table that has the length at which it does, with the split of one valley, and the next length with the split of the
other, interpolates between splits of one valley everywhere: no prompt is between the two.
"""

from __future__ import annotations

from collections.abc import Callable

from partitioner.searches.evaluations import Cost, SearchResult
from partitioner.table.entry import scaled
from runahead.context import ContextPartition

EQUAL = 0.0005
"""TTFTs that differ by less than this share cross here: it does not matter where exactly."""


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
    """The splits of two lengths, one apart, between which the valley of one split hands over to that of another.

    Both valleys are followed towards each other to where their TTFTs cross, by bisection.

    Args:
        search_near: the best split near a given one, of the same length.
        shorter, longer: the splits, of two lengths; each is returned as it is if its valley ends at its own length.
        between: the length to look at first, where lookups lose.
        best_s: the best TTFT that is known there.
        max_loss: splits are in one valley if halfway between them TTFT is longer than theirs by this share at most.

    Returns:
        None if both are in one valley, or if neither is worth following: both are worse than the best by `max_loss`.
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
