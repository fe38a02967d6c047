"""Comparison of variants, from measured lines."""

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
"""Fields of a line that must agree for measurements to be compared."""

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
"""Fields that the tables and pictures need in a line, in the form of `benchmarks.harness.lines.fits`."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of several values."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values), number=len(values))


@dataclass(kw_only=True)
class Point:
    """All runs of one variant at one length on one network; `line` is the last line, for fields that runs share."""

    line: Line
    ttft_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """TTFT in seconds by (benchmark job, round)."""

    @property
    def seconds(self) -> Spread:
        return Spread.over(list(self.ttft_s.values()))

    def add(self, line: Line) -> None:
        self.line = line
        for run in line["runs"]:
            self.ttft_s[line["job"], run["round"]] = run["ttft_s"]

    def faster_than(self, other: Point) -> Spread | None:
        """Ratio of the other's TTFT to this one's, round by round; None if they share no round."""
        rounds = self.ttft_s.keys() & other.ttft_s.keys()
        ratios = [other.ttft_s[each] / self.ttft_s[each] for each in sorted(rounds)]
        return Spread.over(ratios) if ratios else None


@dataclass(frozen=True, kw_only=True)
class NetworkKind:
    """Kind of network between ranks: "loopback", "one host", "given" or "netns"; `gbps` is None where unknown."""

    kind: str
    gbps: float | None = None
    compute_share: float | None = None
    noise: bool = False

    @classmethod
    def from_line(cls, line: Line) -> NetworkKind:
        return cls(**{name: line["network"][name] for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        if self.gbps is None:
            return self.kind
        share = "" if self.compute_share is None else f" (K,V take {self.compute_share:.0%} of TTFT(p))"
        return f"{self.gbps:.4g} Gbit/s{share}{', noise' if self.noise else ''}"


@dataclass(kw_only=True)
class Comparison:
    """Points that can be compared: one model on one machine, by one commit.

    Attributes:
        place: fields of `PLACE`, on which all points agree.
        points: (network, length) -> variant -> point.
    """

    place: dict[str, Any]
    points: dict[tuple[NetworkKind, int], dict[str, Point]] = field(default_factory=dict)

    def networks(self) -> list[NetworkKind]:
        """Sort networks: those without a rate first, then from fast to slow, quiet before noisy."""
        found = {network for network, _ in self.points}
        return sorted(found, key=lambda each: (-(each.gbps or float("inf")), each.noise))

    def lengths(self, network: NetworkKind) -> list[int]:
        return sorted(length for at, length in self.points if at == network)

    def along_lengths(self, network: NetworkKind, variant: str) -> dict[int, Point]:
        """Points of a variant by prompt length, in ascending order."""
        found = {length: self.points[network, length].get(variant) for length in self.lengths(network)}
        return {length: point for length, point in found.items() if point is not None}

    def line(self, network: NetworkKind, length: int) -> Line:
        """The first line of a network and length, for the fields that all of them share."""
        return next(iter(self.points[network, length].values())).line

    def noise_pairs(self) -> list[tuple[NetworkKind, int, str, float, float]]:
        """(network, length, variant, median TTFT in seconds, that with noise) of all that ran both ways."""
        pairs = []
        for (network, length), points in self.points.items():
            noisy = {} if network.noise else self.points.get((replace(network, noise=True), length), {})
            for name in points:
                if name in noisy:
                    pairs.append((network, length, name, points[name].seconds.median, noisy[name].seconds.median))
        return pairs

    def variants(self) -> list[str]:
        """Names of the measured variants, in the order of `VARIANTS`."""
        found = {name for points in self.points.values() for name in points}
        return [name for name in VARIANTS if name in found]

    def subject(self) -> str:
        """One-line description of model, ranks, machine and commit of the points."""
        place = self.place
        hardware, model = place["hardware"], place["model"]
        where = hardware["gpus"][0] if place["device"] == "cuda" else hardware["cpu"]
        threads = (
            "" if place["threads"] is None else f" x {place['threads']} thread{'s' if place['threads'] > 1 else ''}"
        )
        ranks = f"{place['ranks']} rank{'s' if place['ranks'] > 1 else ''}{threads}"
        return f"{model['name']}, {place['dtype']}, {ranks}, {where}, commit {place['commit']}"


def read(path: str) -> list[Line]:
    """Read all lines of a file, except those of variants that no longer exist.

    Raises: ValueError: a line is not a measurement of a benchmark.
    """
    return [line for line in lines.read(path, fields=FIELDS) if line["variant"] in VARIANTS]


def comparisons(found_lines: Iterable[Line]) -> list[Comparison]:
    """Group lines that can be compared, in the order of their last line."""
    found: dict[str, Comparison] = {}
    for line in found_lines:
        place = {name: line[name] for name in PLACE}
        at = json.dumps(place, sort_keys=True)
        comparison = found.pop(at, None) or Comparison(place=place)
        found[at] = comparison
        points = comparison.points.setdefault((NetworkKind.from_line(line), int(line["length"])), {})
        points.setdefault(line["variant"], Point(line=line)).add(line)
    return list(found.values())
