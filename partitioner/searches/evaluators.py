"""Evaluators of partitions for a search: TTFT on simulated clusters, or measured on live ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from partitioner.measure import LiveCost
from partitioner.options import SearchRun
from partitioner.searches.best_split import simulated_cost
from partitioner.searches.evaluations import Cost
from partitioner.searches.points import Points
from partitioner.searches.progress import SearchProgress
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies


class Evaluator(Protocol):
    """Gives the cost of partitions, each of which is evaluated once.

    Attributes:
        clusters: the ranks with their compute, by number of ranks.
        is_quick: an evaluation takes milliseconds, so that searches may compare many lengths.
    """

    clusters: Mapping[int, Cluster]
    is_quick: bool

    def cost(self, length: int, count: int) -> Cost:
        """Cost of the partitions of a prompt of this length over this number of ranks."""

    def spread(self, partition: ContextPartition) -> float | None:
        """Spread of repeated measurements of a partition with the latest cost; None if nothing was repeated."""


class SimulatedEvaluator:
    """TTFT on simulated clusters."""

    is_quick = True

    def __init__(self, clusters: Mapping[int, Cluster], progress: SearchProgress) -> None:
        self.clusters = clusters
        self._costs = {
            count: Points().remembering(progress.timed(simulated_cost(cluster))) for count, cluster in clusters.items()
        }

    def cost(self, length: int, count: int) -> Cost:
        return self._costs[count]

    def spread(self, partition: ContextPartition) -> float | None:
        return None


class LiveEvaluator:
    """TTFT on live ranks, where every evaluation runs prefills. Every rank makes the same calls.

    Args:
        policies: cache policies of each rank; by default none.
        run: the options; rank 0 keeps measured points in a file beside the table, from which later runs take them.
        fingerprint_key: what points are valid for, beside the objective.
    """

    is_quick = False

    def __init__(
        self,
        clusters: Mapping[int, Cluster],
        progress: SearchProgress,
        *,
        run: SearchRun,
        ranks: Ranks,
        model: Model,
        policies: RankPolicies | None = None,
        fingerprint_key: str,
    ) -> None:
        self.clusters, self._progress = clusters, progress
        self._run, self._ranks, self._model, self._policies = run, ranks, model, policies
        self._purpose = {"fingerprint": fingerprint_key, "objective": run.search.objective.name}
        self._live: LiveCost | None = None

    def cost(self, length: int, count: int) -> Cost:
        live = LiveCost(
            self._model,
            self._ranks,
            self._run.prefill,
            length,
            repeats=self._run.search.repeats,
            policies=self._policies,
        )
        self._live = live
        points = Points(Path(f"{self._run.table}.points.jsonl") if self._ranks.rank == 0 else None, self._purpose)
        known = self._ranks.on_rank_0("earlier points", lambda: {} if self._run.search.force else points.read())
        points.known = {key: value for key, value in known.items() if len(key) == count + 1 and key[-1] == length}
        return points.remembering(self._progress.timed(lambda partition: live(self._with_idle(partition))))

    def spread(self, partition: ContextPartition) -> float | None:
        assert self._live is not None, "nothing was evaluated"
        return self._live.spread.get(self._with_idle(partition).boundaries)

    def _with_idle(self, partition: ContextPartition) -> ContextPartition:
        """The partition with an empty chunk for every live rank that it does not have."""
        idle = (partition.num_tokens,) * (self._ranks.num_stages - partition.num_ranks)
        return replace(partition, boundaries=partition.boundaries + idle)
