"""The split that balances the chain, from a cost and the slowness of each rank, and what a prompt corrects in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from partitioner.auto.alone import BothWays
from partitioner.auto.slowness import Slowness
from partitioner.cost.link import Links
from partitioner.searches.best_split import Effort
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition

EFFORT = Effort(
    links_matter=0.02, strides=64, most_messages=160_000, least_evaluations=8, most_evaluations=64, leave_out=False
)
"""Effort of a search for which a prompt waits."""
LEAST_SHARE = 1 / 32
"""Least chunk of a rank, as a share of an even chunk."""
WAITS_MATTER = 0.05
"""Share of TTFT by which waits, mean over ranks, differ from the simulated ones before the link's bandwidth is
corrected: layers that do not take equally long make ranks wait a little on any link."""
AT_ONCE = 1e12
"""Speed of a rank that only sends what it has."""
MOST_DOUBLINGS, BISECTIONS = 12, 8
"""Most doublings by which one prompt corrects the bandwidth, up or down, and steps in which they are bisected."""


class Balance:
    """Splits prompts over the ranks of a cluster, and learns from them.

    Args:
        cluster: cost of the compute, and links; its speeds are replaced by what is learned.
        slowness: of each rank.
        lent: factor by which the last rank is faster with the threads that it is lent while the others wait, at best.
        gained: by which it was in a timing, which decides until a prompt of about a length was seen; None: by `lent`.
        ways: times of prompts that the last rank or all have computed.
    """

    def __init__(
        self,
        cluster: Cluster,
        slowness: Slowness,
        *,
        lent: float = 1.0,
        gained: float | None = None,
        ways: BothWays | None = None,
    ) -> None:
        self.cluster, self.slowness, self.lent, self.ways = cluster, slowness, lent, ways or BothWays()
        self.gained = lent if gained is None else gained

    def split(self, num_tokens: int) -> ContextPartition:
        """The split of a prompt with the earliest first token, as far as is known."""
        return _with_all_ranks(EFFORT.split(num_tokens, self._cluster_at(num_tokens)))

    def is_alone_sooner(self, partition: ContextPartition, num_stored: int = 0) -> bool:
        """Whether the last rank computes a prompt alone sooner than all ranks do, split like this.

        Args:
            num_stored: tokens before the prompt's that the last rank has, and would send to the others.
        """
        num_tokens = partition.num_tokens
        alone_s, all_s = self._alone_s(num_tokens, num_stored), self._all_s(partition, num_stored)
        return self.ways.is_alone_sooner(num_tokens, alone_s, all_s, timed=math.log(self.lent / self.gained))

    def learn_time(self, partition: ContextPartition, seconds: float) -> None:
        """Learn from the seconds of a prompt which way is sooner."""
        num_tokens, is_alone = partition.num_tokens, len(partition.chain) == 1
        predicted_s = self._alone_s(num_tokens) if is_alone else self._all_s(partition)
        self.ways.learn(num_tokens, is_alone=is_alone, predicted_s=predicted_s, measured_s=seconds)

    def _alone_s(self, num_tokens: int, num_stored: int = 0) -> float:
        """Seconds on the last rank, with the threads that are lent to it, if these gain as much as they may."""
        speed = self.lent * math.exp(-self.slowness.at(num_tokens)[-1])
        return self._seconds(ContextPartition(boundaries=(0, num_tokens)), [speed], None, num_stored)

    def _all_s(self, partition: ContextPartition, num_stored: int = 0) -> float:
        speed = [math.exp(-log) for log in self.slowness.at(partition.num_tokens)]
        return self._seconds(partition, speed, self.cluster.links, num_stored)

    def _seconds(self, partition: ContextPartition, speed: list[float], links: Links | None, num_stored: int) -> float:
        """Simulated seconds of ranks of these speeds. A first rank that takes no time sends what is stored."""
        if num_stored:
            partition = ContextPartition(boundaries=(0, *(num_stored + end for end in partition.boundaries)))
            speed = [AT_ONCE, *speed]
            links = None if links is None else Links(len(speed), links.default)
        return simulate(partition, replace(self.cluster, speed=speed, links=links)).ttft_s

    def learn(
        self,
        partition: ContextPartition,
        expected_s: Sequence[float],
        compute_s: Sequence[float],
        wait_s: Sequence[float],
    ) -> None:
        """Correct the slowness by what each rank computed, and the link by how long the ranks waited.

        Args:
            expected_s: of the partition.
            compute_s, wait_s: measured seconds by rank.
        """
        self.slowness.learn(partition.num_tokens, expected_s, compute_s)
        # With the speeds of this prompt, so that waits for a slow rank are not taken for those of a slow link.
        speed = [
            expected / measured if expected > 0 and measured > 0 else 1.0
            for expected, measured in zip(expected_s, compute_s, strict=True)
        ]
        self._correct_link(partition, replace(self.cluster, speed=speed), sum(wait_s))

    def expected_s(self, partition: ContextPartition) -> list[float]:
        """Seconds of compute by rank, without slowness."""
        return simulate(partition, replace(self.cluster, speed=[1.0] * self.cluster.num_ranks)).compute_s

    def _correct_link(self, partition: ContextPartition, cluster: Cluster, waited_s: float) -> None:
        """Choose the bandwidth at which the simulated waits are as measured, if at the present one they are not.

        Waits become shorter with bandwidth, so it is bisected.
        """
        links = cluster.links
        if links is None:
            return

        def doubled(times: float) -> Links:
            link = links.default
            return Links(links.num_ranks, replace(link, bandwidth_Bps=link.bandwidth_Bps * 2**times))

        def simulated_s(times: float) -> float:
            return sum(simulate(partition, replace(cluster, links=doubled(times))).wait_s)

        limit_s = WAITS_MATTER * cluster.num_ranks * simulate(partition, cluster).ttft_s
        present_s = abs(simulated_s(0.0) - waited_s)
        if present_s <= limit_s:
            return
        low, high = -float(MOST_DOUBLINGS), float(MOST_DOUBLINGS)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if simulated_s(middle) > waited_s else (low, middle)
        if present_s - abs(simulated_s(high) - waited_s) > limit_s:
            self.cluster = replace(self.cluster, links=doubled(high))

    def _cluster_at(self, num_tokens: int) -> Cluster:
        pace = self.slowness.pace
        return replace(self.cluster, speed=[math.exp(-log - pace) for log in self.slowness.at(num_tokens)])


def _with_all_ranks(partition: ContextPartition) -> ContextPartition:
    """The partition with a few tokens for every rank: one without any could never be seen to be fast again."""
    num_tokens, num_ranks = partition.num_tokens, partition.num_ranks
    least = math.ceil(num_tokens * LEAST_SHARE / num_ranks) if num_tokens >= num_ranks else 0
    ends = [0]
    for rank, end in enumerate(partition.boundaries[1:], start=1):
        ends.append(min(max(end, ends[-1] + least), num_tokens - (num_ranks - rank) * least))
    return ContextPartition(boundaries=tuple(ends))
