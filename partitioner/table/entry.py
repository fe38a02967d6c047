"""One line of a lookup table: a split and its time to first token."""

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
"""Of two entries for one prompt the one with more of it is kept, whatever its TTFT: a model may flatter."""

MOST = 1 << 40
"""Tokens or ranks. Above is no prompt but a damaged file."""

DATE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The best split that was found for one prompt length and number of ranks.

    Attributes:
        boundaries: 0, ..., length; one chunk per rank, empty for ranks that had better be idle.
        ttft_s: its seconds to the first token.
        objective: where they come from: measured, replayed or modelled.
        spread: of repeated measurements, (largest - smallest) / median; None if nothing was repeated.
        date: UTC, ISO 8601; "" is unknown and counts as older than any.

    Raises:
        ValueError: one of them is not what it should be.
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
        """Every rank's share of the prompt."""
        return [(end - start) / self.length for start, end in pairwise(self.boundaries)]

    def scaled(self, length: int) -> ContextPartition:
        """A prompt of another length in the same ratios."""
        return scaled(self.partition, length)

    @property
    def preference(self) -> tuple[int, str, float, float, tuple[int, ...]]:
        """Of two entries for one prompt the larger is kept: trust, then date, TTFT and the smaller spread.

        The boundaries only make it a strict order.
        """
        spread = math.inf if self.spread is None else self.spread
        return TRUST[self.objective], self.date, -self.ttft_s, -spread, self.boundaries


def scaled(partition: ContextPartition, length: int) -> ContextPartition:
    """A prompt of another length in the same ratios."""
    if length == partition.num_tokens:
        return partition
    return from_shares([end / partition.num_tokens for end in partition.boundaries], length)


def from_shares(ends: Iterable[float], length: int) -> ContextPartition:
    """From the share of the prompt before each boundary; floats that do not decrease stay so when rounded."""
    inner = [min(round(end * length), length) for end in ends][1:-1]
    return ContextPartition(boundaries=(0, *inner, length))


def shown(value: object) -> str:
    """A value from a file as a message can show it: on one line, and not a whole book."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
