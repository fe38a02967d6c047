"""Searches for the split with the earliest first token on a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Cost, SearchResult, SearchTask
from partitioner.searches.seeded import Seeded
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.simulation.pipeline import simulate_pipeline
from runahead.context import ContextPartition, even

MOST_CHUNKS = 256
"""Most chunks of a pipeline that are tried."""


def simulated_cost(cluster: Cluster) -> Cost:
    """Cost function that simulates the TTFT of a partition on a cluster."""
    return lambda partition: simulate(partition, cluster).ttft_s


def starts(num_tokens: int, num_ranks: int, cluster: Cluster) -> list[ContextPartition]:
    """Equal work and even chunks, which are the better start if links are so slow that compute hardly counts."""
    balanced = equal_work(num_tokens, num_ranks, cluster.compute, cluster.speed[:num_ranks])
    return [balanced, even(num_tokens, num_ranks)]


def best_split(
    num_tokens: int,
    num_ranks: int,
    cluster: Cluster,
    *,
    min_stride: int,
    seeds: Sequence[ContextPartition] = (),
    leave_out: bool = True,
    max_evaluations: int | None = None,
) -> SearchResult:
    """Search the best partition over the leading ranks from the best of equal work, even chunks and `seeds`.

    Args:
        min_stride, leave_out, max_evaluations: as in `SearchTask`.

    Raises:
        ValueError: as for `Seeded.search`, or more ranks than the cluster has.
    """
    if not 1 <= num_ranks <= cluster.num_ranks:
        raise ValueError(f"search.ranks={num_ranks} must be 1 to {cluster.num_ranks}, the ranks of the cluster")
    cost = simulated_cost(cluster)
    task = SearchTask(
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        min_stride=min_stride,
        leave_out=leave_out,
        ranks_alike=cluster.is_uniform,
        max_evaluations=max_evaluations,
    )
    return Seeded().search(cost, task, min([*starts(num_tokens, num_ranks, cluster), *seeds], key=cost))


def best_chunks(
    num_tokens: int,
    num_ranks: int,
    cluster: Cluster,
    *,
    activation_bytes: float,
    min_stride: int,
    max_evaluations: int | None = None,
) -> SearchResult:
    """Search the chunks of a pipeline: how many, from equal work and even ones, and then where each ends.

    Args:
        num_ranks, activation_bytes: as of `simulate_pipeline`.
        min_stride, max_evaluations: as in `SearchTask`.

    Raises:
        ValueError: as for `simulate_pipeline`.
    """

    def cost(chunks: ContextPartition) -> float:
        return simulate_pipeline(chunks, num_ranks, cluster, activation_bytes=activation_bytes).ttft_s

    seeds, most = list[ContextPartition](), max(1, num_tokens // min_stride)
    for number in sorted({min(most, round(2 ** (step / 2))) for step in range(2 * MOST_CHUNKS.bit_length())}):
        if number <= MOST_CHUNKS:
            seeds += [even(num_tokens, number), equal_work(num_tokens, number, cluster.compute)]
    best = min(seeds, key=cost)
    task = SearchTask(
        num_tokens=num_tokens,
        num_ranks=best.num_ranks,
        min_stride=min_stride,
        ranks_alike=True,
        max_evaluations=max_evaluations,
    )
    return Seeded().search(cost, task, best)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a search by simulation while somebody waits for its split.

    Attributes:
        links_matter: share of TTFT that communication must take for a split to be searched; below it equal work is
            taken. Where states are handed on, one is always searched, since ranks wait for them on any link.
        strides: a boundary is searched in steps of an even chunk's length divided by this.
        most_messages: about how many messages may be simulated in all; 160,000 take a second.
        least_evaluations, most_evaluations: bounds of the number of simulations, whatever that says.
        leave_out: also try to leave ranks out.
    """

    links_matter: float
    strides: int
    most_messages: int
    least_evaluations: int
    most_evaluations: int
    leave_out: bool

    def split(self, num_tokens: int, cluster: Cluster) -> ContextPartition:
        """The best split over all ranks of a cluster that this effort finds."""
        num_ranks, cost = cluster.num_ranks, simulated_cost(cluster)
        balanced = equal_work(num_tokens, num_ranks, cluster.compute, cluster.speed)
        free = simulated_cost(cluster.without_communication())
        if not cluster.hands_on_states and cost(balanced) <= (1 + self.links_matter) * free(balanced):
            return balanced
        evaluations = self.most_messages // (cluster.compute.num_places * num_ranks**2)
        return best_split(
            num_tokens,
            num_ranks,
            cluster,
            min_stride=max(1, num_tokens // (self.strides * num_ranks)),
            leave_out=self.leave_out,
            max_evaluations=min(self.most_evaluations, max(self.least_evaluations, evaluations)),
        ).partition


def practical_bound(num_tokens: int, num_ranks: int, cluster: Cluster, *, min_stride: int) -> SearchResult:
    """The paper's practical bound TTFT(p): the best split if communication takes no time.

    Raises:
        ValueError: as for `best_split`.
    """
    return best_split(num_tokens, num_ranks, cluster.without_communication(), min_stride=min_stride)


def best_splits(num_tokens: int, cluster: Cluster, *, min_stride: int) -> dict[int, SearchResult]:
    """Find the best split over each number of leading ranks, ascending.

    Raises:
        ValueError: as for `best_split`.
    """
    counts = range(1, cluster.num_ranks + 1)
    return {count: best_split(num_tokens, count, cluster, min_stride=min_stride) for count in counts}
