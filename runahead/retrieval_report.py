"""What a retrieving policy fetched while decoding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RetrievalReport:
    """What was retrieved while decoding, layer by layer; None in layers that attend to everything.

    `fetched_share` is the mean share of the stored slots, `hit_mass` the mean attention probability of what attention
    saw, in the steps that were sampled. `evicted` slots of each row and KV head were given up to stay within the pool's
    limit. `host_bytes` are those of the pool.
    """

    fetched_share: list[float | None]
    hit_mass: list[float | None]
    evicted: list[int]
    host_bytes: int

    @property
    def mean_fetched_share(self) -> float | None:
        """Over the layers that retrieve."""
        shares = [share for share in self.fetched_share if share is not None]
        return sum(shares) / len(shares) if shares else None
