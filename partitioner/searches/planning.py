"""Searches for the split with the earliest first token on a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, SearchResult, Step
from partitioner.searches.seeded import seeded_search
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition, even


def simulated_cost(cluster: Cluster) -> Cost:
    """Cost function that simulates the TTFT of a partition on a cluster."""
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
    """Search the best partition over the leading ranks from the best of equal work, even chunks and `seeds`.

    Even chunks are the better start if links are so slow that compute hardly counts.

    Args:
        cost: cost function; by default `simulated_cost` of the cluster.

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
    """The paper's practical bound TTFT(p): the best split if communication takes no time.

    Raises:
        ValueError: as for `best_split`.
    """
    return best_split(num_tokens, num_ranks, cluster.without_communication(), min_stride=min_stride)


def best_splits(
    num_tokens: int, cluster: Cluster, *, min_stride: int, candidates: Iterable[int] | None = None
) -> dict[int, SearchResult]:
    """Find the best split over each number of leading ranks, ascending.

    Args:
        candidates: numbers of ranks, to which 1 is added; by default all.

    Raises:
        ValueError: as for `best_split`.
    """
    counts = sorted({1, *(range(1, cluster.num_ranks + 1) if candidates is None else candidates)})
    return {count: best_split(num_tokens, count, cluster, min_stride=min_stride) for count in counts}
