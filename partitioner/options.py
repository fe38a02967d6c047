"""The options of a search, as dataclasses that check themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runahead.config import ModelOptions, PrefillName, PrefillOptions, RanksOptions, choice, require

MAX_TOKENS, MAX_RANKS = 1 << 40, 1 << 16
"""Largest prompt and number of ranks that options accept."""


class Objective(Enum):
    """Origin of a partition's cost: live ranks, measured compute on simulated links, or a fitted cost model."""

    measured = "measured"
    replayed = "replayed"
    modelled = "modelled"


class SearchMethod(Enum):
    """Search method: pattern search from a seed, or the paper's grid."""

    seeded = "seeded"
    grid = "grid"


@dataclass(kw_only=True)
class LinkOptions:
    """Links between ranks, for planning: `gbps` in 1e9 bits per second, measured between live ranks if it is None.

    `shared`: all links of a rank share one wire, such as a host's network card.
    """

    gbps: float | None = None
    latency_us: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        gbps, latency_us = self.gbps, self.latency_us
        require(gbps is None or 0 < gbps < math.inf, "link.gbps", gbps, "must be above 0 (1e9 bits per second)")
        require(0 <= latency_us < math.inf, "link.latency_us", latency_us, "must be microseconds of at least 0")


@dataclass(kw_only=True)
class SearchOptions:
    """Options of a search over prompt `lengths` in tokens and numbers of `ranks` (None: all up to those started).

    `reach` bounds how far, as a share of the prompt, a boundary may move from the start of a search; boundaries are
    multiples of `min_stride` tokens. `repeats` are runs per measured point. `probe_chunks` and `probe_prefixes` are the
    lengths whose compute is measured, and `probe_layers` the number of layers run for that. `speeds` are the ranks'
    speeds relative to the measured device. `max_loss` is the share of TTFT that a lookup between two lengths may cost
    before a simulated search fits the entries to each other or adds lengths; None: neither. `force` measures again
    what earlier runs measured.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    ranks: list[int] | None = None
    objective: Objective = Objective.replayed
    method: SearchMethod = SearchMethod.seeded
    min_stride: int = 32
    reach: float = 0.15
    repeats: int = 3
    probe_chunks: list[int] | None = None
    probe_prefixes: list[int] | None = None
    probe_layers: int = 4
    speeds: list[float] | None = None
    max_loss: float | None = 0.01
    force: bool = False

    def __post_init__(self) -> None:
        self.objective = choice("search.objective", Objective, self.objective)
        self.method = choice("search.method", SearchMethod, self.method)
        for name in ("lengths", "ranks", "probe_chunks", "probe_prefixes"):
            values, option = getattr(self, name), f"search.{name}"
            if values is not None:
                most = MAX_RANKS if name == "ranks" else MAX_TOKENS
                require(max(values, default=0) <= most, option, values, f"must hold numbers of at most {most:,}")
                require(min(values, default=0) >= 1, option, values, "must be a list of whole numbers of at least 1")
                setattr(self, name, sorted(set(values)))
        for name in ("min_stride", "repeats", "probe_layers"):
            require(getattr(self, name) >= 1, f"search.{name}", getattr(self, name), "must be at least 1")
        reach, loss, speeds = self.reach, self.max_loss, self.speeds
        require(0 < reach <= 1, "search.reach", reach, "must be a share of the prompt above 0 and at most 1")
        if loss is not None:
            require(0 < loss < math.inf, "search.max_loss", loss, "must be a share of TTFT above 0, or null")
        for speed in speeds or ():
            require(0 < speed < math.inf, "search.speeds", speeds, "must be above 0, 1 being the measured device")

    def stride(self, length: int, count: int) -> int:
        """`min_stride`, or less where a prompt's chunks are short."""
        return min(self.min_stride, max(1, length // (8 * count)))

    def reach_tokens(self, length: int, count: int) -> int | None:
        """Search radius around each boundary, in tokens; None is unlimited.

        Only searches on live ranks, which take long, are limited: there the best split is near equal work, but on slow
        simulated links it may be far from it.
        """
        if self.objective is not Objective.measured:
            return None
        return max(self.stride(length, count), int(self.reach * length))


@dataclass(kw_only=True)
class SearchRun:
    """Options of one run of partitioner/search.py.

    Attributes:
        policy: name and options of the cache policy that says which KV heads stream, as of a run.
        table: the JSON file that it writes or adds to.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    policy: dict[str, Any] = field(default_factory=lambda: {"name": "full", "positions": "original"})
    link: LinkOptions = field(default_factory=LinkOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    table: str | None = None

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("table=<json file> is needed: the file that the partitions are written to")
        if self.prefill.name is PrefillName.single:
            raise ValueError("prefill=single has no partition to search for; use prefill=kv_runahead")
        speeds, counts = self.search.speeds, self.search.ranks
        if speeds is not None and counts is not None and max(counts) > len(speeds):
            raise ValueError(f"search.speeds has {len(speeds)} ranks but search.ranks goes up to {max(counts)}")
        if self.search.objective is Objective.measured and (speeds is not None or self.link.gbps is not None):
            raise ValueError("search.speeds and link.gbps are for planning; they cannot change what is measured live")
