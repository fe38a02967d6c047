"""A digest of a checkpoint's weights, as Runahead's server computes it: the same however the files are sharded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 64
"""Of each tensor, at its begin, middle and end: all bytes of large weights would take minutes."""


def digest(folder: Path) -> str:
    """SHA-256 in hex over name, dtype, shape and some bytes of each tensor, by name.

    Raises: ValueError: the folder has no weights in safetensors files, or one of them is damaged.
    """
    places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path, wanted in _files(folder):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error
        header.pop("__metadata__", None)
        places |= {
            name: (path, 8 + length, entry) for name, entry in header.items() if wanted is None or name in wanted
        }
    made = hashlib.sha256()
    for name in sorted(places, key=str.encode):
        path, begin, entry = places[name]
        start, end = entry["data_offsets"]
        num_bytes = end - start
        made.update(f"{name} {entry['dtype']} {json.dumps(entry['shape'])}\n".encode())
        with path.open("rb") as file:
            for at in (0, num_bytes // 2, max(0, num_bytes - SAMPLE_BYTES)):
                file.seek(begin + start + at)
                made.update(file.read(min(SAMPLE_BYTES, num_bytes - at)))
    return made.hexdigest()


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """The files, each with the names of its tensors that count; None: all of them."""
    index = folder / INDEX
    if index.is_file():
        by_file: dict[str, set[str]] = {}
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            by_file.setdefault(file, set()).add(name)
        return [(folder / file, names) for file, names in sorted(by_file.items())]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder} has no *.safetensors")
    return [(path, None) for path in found]
