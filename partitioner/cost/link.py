"""The wires between ranks: how long K,V take from one to another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BITS_PER_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed link. A message of n bytes keeps it busy for n / bandwidth_Bps and lands latency_s after that.

    Attributes:
        latency_s: seconds.
        bandwidth_Bps: bytes per second; `math.inf` costs nothing.
        shared: the sender's shared links leave through one port, and the receiver's arrive through one: a host's
            network card. Otherwise every pair of ranks has a wire of its own, as within NVLink.

    Raises:
        ValueError: a negative latency, a bandwidth that is not above 0.
    """

    latency_s: float
    bandwidth_Bps: float
    shared: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"link.latency_s={self.latency_s} must be a number of seconds of at least 0")
        if not self.bandwidth_Bps > 0:
            raise ValueError(f"link bandwidth of {self.bandwidth_Bps} bytes per second must be above 0")

    @classmethod
    def from_gbps(cls, gbps: float, *, latency_s: float = 0.0, shared: bool = False) -> Link:
        """From 1e9 bits per second, as networks are named.

        Raises:
            ValueError: as for a link.
        """
        if not gbps > 0:
            raise ValueError(f"link.gbps={gbps} must be above 0 (1e9 bits per second)")
        return cls(latency_s=latency_s, bandwidth_Bps=gbps * 1e9 / BITS_PER_BYTE, shared=shared)

    @classmethod
    def from_GBps(cls, GBps: float, *, latency_s: float = 0.0, shared: bool = False) -> Link:  # noqa: N802
        """From 1e9 bytes per second, as in the paper.

        Raises:
            ValueError: as for a link.
        """
        return cls.from_gbps(GBps * BITS_PER_BYTE, latency_s=latency_s, shared=shared)

    def seconds(self, num_bytes: float) -> float:
        """Of one message on an idle link."""
        return self.latency_s + num_bytes / self.bandwidth_Bps


class Links:
    """The directed links between `num_ranks` ranks.

    Args:
        default: of every pair that has no link of its own.
        overrides: (from rank, to rank) -> link.

    Raises:
        ValueError: an override names a rank that is not there.
    """

    def __init__(self, num_ranks: int, default: Link, overrides: Mapping[tuple[int, int], Link] | None = None) -> None:
        self.num_ranks, self.default, self.overrides = num_ranks, default, dict(overrides or {})
        for pair in self.overrides:
            if len(set(pair)) != 2 or any(not 0 <= rank < num_ranks for rank in pair):
                raise ValueError(f"link {pair[0]}->{pair[1]} must join two different ranks of 0 to {num_ranks - 1}")

    @classmethod
    def uniform(cls, num_ranks: int, *, bandwidth_Bps: float, latency_s: float = 0.0, shared: bool = False) -> Links:
        """Links that are all alike."""
        return cls(num_ranks, Link(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps, shared=shared))

    def between(self, sender: int, receiver: int) -> Link:
        return self.overrides.get((sender, receiver), self.default)
