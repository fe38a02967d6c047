"""The split, the number of ranks and their order that make the first token earliest on a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, SearchResult, Step
from partitioner.searches.seeded import seeded_search
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition, even

QUICK_EVALUATIONS = 40
"""For comparing orders, before the best ones are searched to the end."""
MOST_TRIED_IN_ALL_ORDERS = 4
FINALISTS = 3


def simulated_cost(cluster: Cluster) -> Cost:
    """TTFT by simulation."""
    return lambda partition: simulate(partition, cluster).ttft_s


def best_split(
    num_tokens: int,
    num_ranks: int,
    cluster: Cluster,
    *,
    min_stride: int,
    seeds: Sequence[ContextPartition] = (),
    cost: Cost | None = None,
    max_evaluations: int | None = None,
    on_evaluation: Callable[[Step], None] | None = None,
) -> SearchResult:
    """The best partition over the leading ranks, searched from the cheapest of equal work, even chunks and `seeds`.

    Even chunks are the better start where links are so slow that compute hardly counts.

    Args:
        cost: the simulated one, by default; or what remembers it.

    Raises:
        ValueError: as for `seeded_search`, or more ranks than the cluster has.
    """
    if not 1 <= num_ranks <= cluster.num_ranks:
        raise ValueError(f"search.ranks={num_ranks} must be 1 to {cluster.num_ranks}, the ranks of the cluster")

    cost = cost or simulated_cost(cluster)
    balanced = equal_work(num_tokens, num_ranks, cluster.compute, cluster.speed[:num_ranks])
    starts = [balanced, even(num_tokens, num_ranks), *seeds]
    return seeded_search(
        cost,
        num_tokens,
        num_ranks,
        min_stride=min_stride,
        seed=min(starts, key=cost),
        ranks_alike=cluster.is_uniform,
        max_evaluations=max_evaluations,
        on_evaluation=on_evaluation,
    )


def practical_bound(num_tokens: int, num_ranks: int, cluster: Cluster, *, min_stride: int) -> SearchResult:
    """TTFT(p): the best split when K,V arrive at once.

    Raises:
        ValueError: as for `best_split`.
    """
    return best_split(num_tokens, num_ranks, cluster.without_communication(), min_stride=min_stride)


@dataclass(kw_only=True)
class NumRanks:
    """The best split for several numbers of ranks, and the number with the earliest first token."""

    best: int
    splits: dict[int, SearchResult]


def best_num_ranks(
    num_tokens: int,
    cluster: Cluster,
    *,
    min_stride: int,
    candidates: Iterable[int] | None = None,
    tolerance: float = 0.0,
) -> NumRanks:
    """The best split over 1, 2, ... leading ranks, and the best of those; of equals, the fewest ranks.

    Args:
        candidates: numbers of ranks to look at; 1 is always one of them, and by default all are.
        tolerance: TTFTs that differ by less than this share are equal: on slow links more ranks still gain a little,
            by taking a few tokens each, and are not worth it.

    Raises:
        ValueError: as for `best_split`, or a negative tolerance.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be a share of TTFT of at least 0")
    counts = sorted({1, *(range(1, cluster.num_ranks + 1) if candidates is None else candidates)})
    splits = {count: best_split(num_tokens, count, cluster, min_stride=min_stride) for count in counts}
    limit_s = (1 + tolerance) * min(split.cost_s for split in splits.values())
    return NumRanks(best=next(count for count in counts if splits[count].cost_s <= limit_s), splits=splits)


@dataclass(kw_only=True)
class RankOrder:
    """Which rank plays which: rank r of the chain is the cluster's rank order[r]. The split is in the new order."""

    order: list[int]
    split: SearchResult


def best_order(num_tokens: int, cluster: Cluster, *, min_stride: int) -> RankOrder:
    """An order of unlike ranks and links, and its split: all orders of up to four ranks, else by exchanging two.

    Orders are compared by short searches; the best few, and the given one, are searched to the end.

    Raises:
        ValueError: as for `best_split`.
    """
    size = cluster.num_ranks
    given = tuple(range(size))
    quick: dict[tuple[int, ...], float] = {}

    def quick_s(order: tuple[int, ...]) -> float:
        if order not in quick:
            permuted = cluster.permuted(order)
            quick[order] = best_split(
                num_tokens, size, permuted, min_stride=min_stride, max_evaluations=QUICK_EVALUATIONS
            ).cost_s
        return quick[order]

    if size <= MOST_TRIED_IN_ALL_ORDERS:
        for order in permutations(range(size)):
            quick_s(order)
    else:
        best, before = given, None
        while best != before:
            before = best
            best = min([best, *_exchanged(best)], key=quick_s)
    finalists = sorted(quick, key=lambda order: (quick[order], order))[:FINALISTS]
    splits = {
        order: best_split(num_tokens, size, cluster.permuted(order), min_stride=min_stride)
        for order in (given, *finalists)
    }
    chosen = min(splits, key=lambda order: splits[order].cost_s)
    return RankOrder(order=list(chosen), split=splits[chosen])


def _exchanged(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All orders with two ranks exchanged."""
    for a, b in combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        yield tuple(swapped)
