"""ClusterKV (Liu et al., DAC 2025): retrieve clusters of similar keys by the scores of their means.

Keys are clustered by direction after the prompt (Sec. III-B), and new ones in blocks. Clusters are taken in the order
of their scores until the budget is full; of the last one that fits in part, the latest tokens. Published code leaves
new tokens outside of the clusters and reads all of them beyond the budget; here each is a cluster of its own until its
block is full. A choice is that of a KV head, the published one of a query head.

There are `cluster` tokens per cluster at every length (published: 400 clusters).
"""

# Legend: K kv heads, T tokens of a segment, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.clustering import Clustering
from policies.clusters import Clusters
from policies.options import Budget, require_least
from policies.retriever import Index, PromptView, Retriever


@dataclass(kw_only=True)
class ClusterKV(Retriever, name="clusterkv"):
    """Retrieve clusters of similar keys, `fetch` slots in total.

    Attributes:
        cluster: mean number of tokens per cluster.
        iterations: of k-means.
        block: number of new tokens that are clustered together.

    Raises:
        ValueError: an option is out of range.
    """

    index_class: ClassVar[type[Clusters]] = Clusters
    takes_full_pool: ClassVar[bool] = False

    fetch: Budget | None = 0.1
    first_layer: int = 2
    sinks: int = 16
    cluster: int = 80
    iterations: int = 20
    block: int = 320

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, cluster=1, iterations=1, block=1)

    @property
    def clusters_key(self) -> str:
        how = self.clustering
        return f"clusters of {how.size}, {how.iterations} rounds, centred={how.centred}, layers from {self.first_layer}"

    def clusters_of(self, layer: int, k_TKH: Tensor) -> Tensor:
        if layer < self.first_layer:
            return torch.zeros(*k_TKH.shape[:2], 1, dtype=torch.int32, device=k_TKH.device)
        return self.clustering.assigned(k_TKH.transpose(0, 1)[None])[0].T.unsqueeze(-1)

    @property
    def clustering(self) -> Clustering:
        """How keys are clustered."""
        return Clustering(
            size=self.cluster,
            iterations=self.iterations,
            block=self.block,
            alone_first=self.sinks,
            alone_last=self.recent,
        )

    def index(self, view: PromptView) -> Index:
        return self.index_class(view, self, self.clustering)
