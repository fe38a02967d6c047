"""Chunks of a prompt for a pipeline of layers, searched by simulation while the prompt waits."""

from __future__ import annotations

from partitioner.searches.best_split import best_chunks
from partitioner.simulation.cluster import Cluster
from runahead.context import ContextPartition

STRIDES, LEAST_STRIDE = 64, 16
"""A chunk begins and ends at multiples of the prompt's length divided by this, and of so many tokens at least."""
MOST_EVALUATIONS = 64


class PipelineChunks:
    """Searches the chunks of prompts of each length, once, with the cost and the link of a cluster.

    Args:
        cluster: a rank is a stage.
        activation_bytes: of a token's hidden states.
    """

    def __init__(self, cluster: Cluster, activation_bytes: float) -> None:
        self.cluster, self._activation_bytes = cluster, activation_bytes
        self._known: dict[int, ContextPartition] = {}

    def split(self, num_tokens: int) -> ContextPartition:
        """The chunks of a prompt with the earliest first token, as far as is known."""
        if num_tokens not in self._known:
            self._known[num_tokens] = best_chunks(
                num_tokens,
                self.cluster.num_ranks,
                self.cluster,
                activation_bytes=self._activation_bytes,
                min_stride=max(LEAST_STRIDE, num_tokens // STRIDES),
                max_evaluations=MOST_EVALUATIONS,
            ).partition
        return self._known[num_tokens]
