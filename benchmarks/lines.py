"""The file of measurements: a JSON line per variant and length, which everything else is made from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runahead.whole_file import write_whole

Line = dict[str, Any]


def read(path: str | os.PathLike[str], *, option: str = "bench.results", kind: str = "variant") -> list[Line]:
    """All lines of a file; none if it is not there.

    Args:
        option: the command line's name for the file.
        kind: a field that every line has.

    Raises: ValueError: a line that is no JSON object; it names the file and the line.
    """
    if not Path(path).exists():
        return []
    lines = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not text:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or kind not in line:
            raise ValueError(f"{option}={os.fspath(path)}: line {number} is no measurement; remove it")
        lines.append(line)
    return lines


def append(path: str | os.PathLike[str], lines: Sequence[Line]) -> None:
    """Add lines, all or none of them.

    Raises: OSError.
    """
    file = Path(path)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    write_whole(path, before + "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def key(about: Mapping[str, Any]) -> str:
    """Of all that decides a measurement; runs with the same key may be put together."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def rounds_done(lines: Sequence[Line], wanted: str) -> int:
    """Rounds that a file has for a key."""
    return sum(len(line["runs"]) for line in lines if line["key"] == wanted)
