"""A digest of a checkpoint's weights, as Runahead's server computes it: the same however the files are sharded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLE_BYTES = 64
"""Bytes that are read of each tensor, at its begin, middle and end: to read large weights whole would take minutes."""


def digest(folder: Path) -> str:
    """SHA-256 in hex over name, dtype, shape and some bytes of each tensor, by name.

    Raises: ValueError: the folder has no weights in safetensors files, one of its files is damaged, or vLLM reads other
        files of it than the server.
    """
    files = server_files(folder)
    places = {name: place for path in files for name, place in _tensors(path).items()}
    _require_same_weights(files, vllm_files(folder), set(places))
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


def server_files(folder: Path) -> list[Path]:
    """The files that Runahead's server reads of a folder, as transformers does. Raises: ValueError."""
    config = folder / "config.json"
    name = _json(config).get("transformers_weights") if config.is_file() else None
    if name is None:
        name = INDEX if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file() else WEIGHTS
    if not isinstance(name, str):
        raise ValueError(f"{config} names {name!r} as its file of weights")
    found = _indexed(folder / name) if name.endswith(".index.json") else [folder / name]
    if missing := [path.name for path in found if not path.is_file()]:
        raise ValueError(f"{folder} has no {missing[0]}")
    return found


def vllm_files(folder: Path) -> list[Path]:
    """The files that vLLM reads of a folder: those of the index, or else all."""
    return _indexed(folder / INDEX) if (folder / INDEX).is_file() else sorted(folder.glob("*.safetensors"))


def _require_same_weights(servers: list[Path], vllms: list[Path], names: set[str]) -> None:
    """Refuse a folder with two sets of weights. What vLLM reads besides, as an adapter's tensors, has other names."""
    if only := sorted(set(servers) - set(vllms)):
        raise ValueError(f"the server reads {only[0]} and vLLM does not; remove the weights or the index that is old")
    for path in sorted(set(vllms) - set(servers)):
        if twice := sorted(names & set(_tensors(path))):
            raise ValueError(f"vLLM also reads {path}, which has {twice[0]} once more; remove the file")


def _indexed(index: Path) -> list[Path]:
    """Files that an index names. Raises: ValueError."""
    by_name = _json(index).get("weight_map")
    if not isinstance(by_name, dict) or not by_name or not all(isinstance(file, str) for file in by_name.values()):
        raise ValueError(f"{index} has no weight_map")
    return [index.parent / file for file in sorted(set(by_name.values()))]


def _json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: ValueError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _tensors(path: Path) -> dict[str, tuple[Path, int, dict[str, Any]]]:
    """Tensors of a file by name: the file, where its data begins, and the header's entry. Raises: ValueError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for entry in header.values():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end or not {"dtype", "shape"} <= entry.keys():
                raise ValueError(f"its header says {entry}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no readable safetensors file ({type(error).__name__}: {error})") from error
    except (MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no readable safetensors file: its header has {length} bytes") from error
    return {name: (path, 8 + length, entry) for name, entry in header.items()}
