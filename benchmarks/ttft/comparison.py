"""Variants against each other, from the lines that were measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness import lines
from benchmarks.harness.lines import Line, fits, is_above_0, is_count, is_number, is_text, or_none
from benchmarks.ttft.variants import VARIANTS

PLACE = ("model", "dtype", "ranks", "threads", "backend", "device", "hardware", "layers_in_flight", "commit")
"""Fields of a line that must agree for figures to stand side by side."""

_SECONDS = dict.fromkeys(("single_s", "free_s", "star_causal_s", "star_dense_s"), is_above_0)
FIELDS: dict[str, Any] = {
    "variant": is_text,
    "length": lambda length: is_count(length) and length > 0,
    "key": is_text,
    "job": is_text,
    "runs": [{"round": is_count, "ttft_s": is_above_0}],
    "network": {
        "kind": is_text,
        "gbps": or_none(is_above_0),
        "compute_share": or_none(is_above_0),
        "noise": lambda noise: isinstance(noise, bool),
    },
    "model": {"name": is_text},
    "dtype": is_text,
    "device": is_text,
    "commit": or_none(is_text),
    "ranks": is_count,
    "threads": or_none(is_count),
    "backend": is_text,
    "layers_in_flight": is_count,
    "hardware": {"cpu": is_text, "cores": is_number, "ram_gib": is_number, "gpus": lambda gpus: isinstance(gpus, list)},
    "versions": {},
    **dict.fromkeys(("sent_bytes", "formula_bytes", "wire_bytes"), or_none(is_number)),
    "memory": {"kv_peak_bytes": [is_number], "peak_bytes": [is_number]},
    "bounds": _SECONDS | {"free_boundaries": [is_count]},
    "flops": lambda flops: flops is None or fits(flops, {"matmul": is_number, "attention": is_number}),
    "peak_flops": is_above_0,
}
"""What the tables and pictures need of a line, as in `benchmarks.harness.lines.fits`."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of several values."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values), number=len(values))


@dataclass(kw_only=True)
class Point:
    """All runs of one variant at one length, on one network; `line` is its last line, for what runs share."""

    line: Line
    ttft_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """By the benchmark that it was in and the round of it."""

    @property
    def variant(self) -> str:
        return str(self.line["variant"])

    @property
    def length(self) -> int:
        return int(self.line["length"])

    @property
    def seconds(self) -> Spread:
        return Spread.of(list(self.ttft_s.values()))

    def add(self, line: Line) -> None:
        self.line = line
        for run in line["runs"]:
            self.ttft_s[line["job"], run["round"]] = run["ttft_s"]

    def faster_than(self, other: Point) -> Spread | None:
        """The other's seconds over this one's, round by round; None if they never ran in the same round."""
        rounds = self.ttft_s.keys() & other.ttft_s.keys()
        ratios = [other.ttft_s[each] / self.ttft_s[each] for each in sorted(rounds)]
        return Spread.of(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True)
class NetworkKind:
    """What joined the ranks: "loopback", "one host", "given" or "netns"; `gbps` is None where nobody said."""

    kind: str
    gbps: float | None = None
    compute_share: float | None = None
    noise: bool = False

    @classmethod
    def of(cls, line: Line) -> NetworkKind:
        return cls(**{name: line["network"][name] for name in cls.__dataclass_fields__})

    def with_noise(self) -> NetworkKind:
        return replace(self, noise=True)

    def __str__(self) -> str:
        if self.gbps is None:
            return self.kind
        share = "" if self.compute_share is None else f" (K,V take {self.compute_share:.0%} of TTFT(p))"
        return f"{self.gbps:.4g} Gbit/s{share}{', noise' if self.noise else ''}"


@dataclass(kw_only=True)
class Comparison:
    """Points that may be compared: one model on one machine, by one commit.

    Attributes:
        place: the fields of `PLACE`, with which all agree.
        points: (network, length) -> variant -> point.
    """

    place: dict[str, Any]
    points: dict[tuple[NetworkKind, int], dict[str, Point]] = field(default_factory=dict)

    def networks(self) -> list[NetworkKind]:
        """Without a rate first, then from fast to slow, quiet before noisy."""
        found = {network for network, _ in self.points}
        return sorted(found, key=lambda each: (-(each.gbps or float("inf")), each.noise))

    def lengths(self, network: NetworkKind) -> list[int]:
        return sorted(length for at, length in self.points if at == network)

    def variants(self) -> list[str]:
        """In the order of the table of variants."""
        found = {name for points in self.points.values() for name in points}
        return [name for name in VARIANTS if name in found]

    def subject(self) -> str:
        """What the points were measured on, in a line."""
        place = self.place
        hardware, model = place["hardware"], place["model"]
        where = hardware["gpus"][0] if place["device"] == "cuda" else hardware["cpu"]
        threads = (
            "" if place["threads"] is None else f" x {place['threads']} thread{'s' if place['threads'] > 1 else ''}"
        )
        ranks = f"{place['ranks']} rank{'s' if place['ranks'] > 1 else ''}{threads}"
        return f"{model['name']}, {place['dtype']}, {ranks}, {where}, commit {place['commit']}"


def read(path: str) -> list[Line]:
    """All lines of a file, but for variants that there are no more.

    Raises: ValueError: one is no measurement of a benchmark.
    """
    return [line for line in lines.read(path, fields=FIELDS) if line["variant"] in VARIANTS]


def comparisons(found_lines: Iterable[Line]) -> list[Comparison]:
    """Lines that belong together, in the order of their last line."""
    found: dict[str, Comparison] = {}
    for line in found_lines:
        place = {name: line[name] for name in PLACE}
        at = json.dumps(place, sort_keys=True)
        comparison = found.pop(at, None) or Comparison(place=place)
        found[at] = comparison
        points = comparison.points.setdefault((NetworkKind.of(line), int(line["length"])), {})
        points.setdefault(line["variant"], Point(line=line)).add(line)
    return list(found.values())
