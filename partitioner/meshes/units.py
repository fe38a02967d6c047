"""Rates as people write them: 200Gbit/s, 3.35TB/s, 989TFLOP/s."""

from __future__ import annotations

import re

from partitioner.cost.link import BITS_PER_BYTE

PREFIXES = {"": 1.0} | {prefix: 1000.0**power for power, prefix in enumerate("kMGTP", start=1)}
BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}

MOST = 1e30
"""Largest rate."""


def bytes_per_s(value: str, option: str) -> float:
    """Bytes per second of a rate in bytes or bits: 450GB/s, 64GiB/s, 200Gbit/s, 200Gbps.

    A lone b is refused, since some write it for bits and some for bytes.

    Raises:
        ValueError: it is not a rate above 0.
    """
    per_unit = {"bit/s": 1 / BITS_PER_BYTE, "bps": 1 / BITS_PER_BYTE, "B/s": 1.0}
    return _rate(value, option, per_unit, "write 450GB/s, 64GiB/s or 200Gbit/s")


def flops(value: str, option: str) -> float:
    """Operations per second: 989TFLOP/s, 312TFLOPS, 1.5P.

    Raises:
        ValueError: it is not a rate above 0.
    """
    return _rate(value, option, {"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0, "": 1.0}, "write 989TFLOP/s")


def _rate(value: str, option: str, per_unit: dict[str, float], remedy: str) -> float:
    units = "|".join(map(re.escape, per_unit))
    found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*([kKMGTP]?i?)({units})\s*", str(value), re.ASCII)
    rate = 0.0
    if found:
        prefix = "k" if found[2] == "K" else found[2]
        rate = float(found[1]) * (PREFIXES | BINARY).get(prefix, 0.0) * per_unit[found[3]]
    if not 0 < rate < MOST:
        shown = " ".join(str(value).split())[:60]
        raise ValueError(f"{option}={shown} is no rate above 0; {remedy}")
    return rate
