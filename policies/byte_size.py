"""Sizes in bytes as people write them: 2GiB, 500MB, 4096."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def num_bytes(value: object, option: str) -> int:
    """Whole bytes of 2GiB (1024^3 each), 2GB (1000^3 each), 2G (as GiB), or a number.

    Args:
        option: whose value it is, for the message.

    Raises:
        ValueError: no such size, or none above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = UNITS.get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if size < 1 or isinstance(value, bool):
        raise ValueError(f"{option}={value} is no size in bytes above 0; write 2GiB, 500MB or a whole number")
    return size
