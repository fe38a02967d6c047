"""Latency and bandwidth of the links between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BITS_PER_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed link. A message of n bytes occupies it for n / bandwidth_Bps and arrives latency_s after that.

    Attributes:
        latency_s: seconds.
        bandwidth_Bps: bytes per second; `math.inf` takes no time.
        shared: all shared links of a sender leave through one port, and all of a receiver arrive through one, such as
            a host's network card. Otherwise every pair of ranks has a wire of its own, as within NVLink.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not above 0.
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
        """Make a link from 1e9 bits per second, the unit of networks. Raises ValueError as the class does."""
        if not gbps > 0:
            raise ValueError(f"link.gbps={gbps} must be above 0 (1e9 bits per second)")
        return cls(latency_s=latency_s, bandwidth_Bps=gbps * 1e9 / BITS_PER_BYTE, shared=shared)

    @classmethod
    def from_GBps(cls, GBps: float, *, latency_s: float = 0.0, shared: bool = False) -> Link:  # noqa: N802
        """Make a link from 1e9 bytes per second, the unit of the paper. Raises ValueError as the class does."""
        return cls.from_gbps(GBps * BITS_PER_BYTE, latency_s=latency_s, shared=shared)

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message on an idle link."""
        return self.latency_s + num_bytes / self.bandwidth_Bps

    def as_json(self) -> dict[str, float | bool | None]:
        """The fields for JSON, which has no infinity: null is a bandwidth that takes no time."""
        return vars(self) | {"bandwidth_Bps": None if self.bandwidth_Bps == math.inf else self.bandwidth_Bps}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Link:
        """Make a link from what `as_json` gives.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        latency_s, bandwidth, shared = fields["latency_s"], fields["bandwidth_Bps"], fields["shared"]
        bandwidth = math.inf if bandwidth is None else float(bandwidth)
        return cls(latency_s=float(latency_s), bandwidth_Bps=bandwidth, shared=bool(shared))


class Links:
    """The directed links between `num_ranks` ranks.

    Args:
        default: link of every pair without an override.
        overrides: links by (from rank, to rank).

    Raises:
        ValueError: an override names a rank that does not exist.
    """

    def __init__(self, num_ranks: int, default: Link, overrides: Mapping[tuple[int, int], Link] | None = None) -> None:
        self.num_ranks, self.default, self.overrides = num_ranks, default, dict(overrides or {})
        for pair in self.overrides:
            if len(set(pair)) != 2 or any(not 0 <= rank < num_ranks for rank in pair):
                raise ValueError(f"link {pair[0]}->{pair[1]} must join two different ranks of 0 to {num_ranks - 1}")

    def between(self, sender: int, receiver: int) -> Link:
        return self.overrides.get((sender, receiver), self.default)
