"""Sizes in bytes in the usual notations: 2GiB, 500MB, 4096."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}

MOST = 2**63 - 1
"""Largest size."""


def num_bytes(value: object, option: str) -> int:
    """Number of bytes of a size: 2GiB (1024^3 each), 2GB (1000^3 each), 2G (as GiB), or a whole number.

    Args:
        value: the size.
        option: full name of the option, for the message.

    Raises:
        ValueError: it is not a size above 0.
    """
    text = str(value) if not isinstance(value, int) or abs(value) <= MOST else "a number of that size"
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = UNITS.get(found[2].lower()) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if not 1 <= size <= MOST or isinstance(value, bool):
        shown = " ".join(text.split())[:60]
        raise ValueError(f"{option}={shown} is no size in bytes above 0; write 2GiB, 500MB or a whole number")
    return int(size)
