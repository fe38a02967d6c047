"""Entry of a lookup table: a split and its time to first token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from partitioner.options import Objective
from partitioner.table.fingerprint import now
from runahead.context import ContextPartition

TRUST = {Objective.modelled.name: 0, Objective.replayed.name: 1, Objective.measured.name: 2}
"""Precedence of objectives: a measured entry replaces a simulated one even if its TTFT is higher."""

MOST = 1 << 40
"""Largest number of tokens or ranks; a larger one means a damaged file."""

DATE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """The best split found for one prompt length and number of ranks.

    Attributes:
        boundaries: 0, ..., length; one chunk per rank, empty for ranks that are idle.
        ttft_s: seconds to the first token with this split.
        objective: origin of `ttft_s`: measured, replayed or modelled.
        spread: of repeated measurements, (largest - smallest) / median; None if nothing was repeated.
        date: UTC, ISO 8601; "" is unknown and counts as older than any.

    Raises:
        ValueError: a value is not valid.
    """

    length: int
    ranks: int
    boundaries: tuple[int, ...]
    ttft_s: float
    objective: str
    spread: float | None = None
    date: str = field(default_factory=now)

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("ranks", self.ranks)):
            if not 1 <= value <= MOST:
                raise ValueError(f"{name} {shown(value)} must be at least 1 and at most {MOST}")
        about = f"boundaries {shown(list(self.boundaries))}"
        if len(self.boundaries) != self.ranks + 1:
            raise ValueError(f"{about} must be {self.ranks + 1} numbers for {self.ranks} ranks")
        if self.boundaries[0] != 0 or self.boundaries[-1] != self.length:
            raise ValueError(f"{about} must start at 0 and end at the length, {self.length}")
        if any(end < start for start, end in pairwise(self.boundaries)):
            raise ValueError(f"{about} must not decrease")
        if not 0 < self.ttft_s < math.inf:
            raise ValueError(f"ttft_s {shown(self.ttft_s)} must be a number of seconds above 0")
        if self.objective not in TRUST:
            raise ValueError(f"objective {shown(self.objective)} is not one of {', '.join(TRUST)}")
        if self.spread is not None and not 0 <= self.spread < math.inf:
            raise ValueError(f"spread {shown(self.spread)} must be at least 0, or null")
        if DATE.fullmatch(self.date) is None:
            raise ValueError(f"date {shown(self.date)} must look like 2026-01-31T12:00:00Z")

    @property
    def partition(self) -> ContextPartition:
        return ContextPartition(boundaries=self.boundaries)

    @property
    def ratios(self) -> list[float]:
        """Share of the prompt per rank."""
        return [(end - start) / self.length for start, end in pairwise(self.boundaries)]

    @property
    def preference(self) -> tuple[int, str, float, float, tuple[int, ...]]:
        """Sort key by which `merge` keeps the larger of two entries: objective, date, lower TTFT, smaller spread.

        Boundaries only make the order strict.
        """
        spread = math.inf if self.spread is None else self.spread
        return TRUST[self.objective], self.date, -self.ttft_s, -spread, self.boundaries


def scaled(partition: ContextPartition, length: int) -> ContextPartition:
    """Split a prompt of another length in the same ratios as `partition`."""
    if length == partition.num_tokens:
        return partition
    return from_shares([end / partition.num_tokens for end in partition.boundaries], length)


def from_shares(ends: Iterable[float], length: int) -> ContextPartition:
    """Partition from the share of the prompt before each boundary; shares must not decrease."""
    inner = [min(round(end * length), length) for end in ends][1:-1]
    return ContextPartition(boundaries=(0, *inner, length))


def shown(value: object) -> str:
    """Text of a value from a file for a message: on one line, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
