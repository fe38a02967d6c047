"""The file format of keys and values.

A file is in safetensors format with one tensor per layer, and is read by mapping. Its metadata have a checksum of each
layer, and name the model and the tokens that it was made for. A damaged file, or one of another model or other tokens,
counts as absent.
"""

# Legend: T stored tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from runahead.cache.slabs import KVShape
from runahead.files import write_whole

FORMAT = "runahead segment 1"


@dataclass(frozen=True, kw_only=True)
class StoredLayers:
    """Keys and values in a file.

    Attributes:
        layers_TKX: keys and values of each layer, (T, K, H + V), by ascending position; mapped.
        checksums: of each layer, as the file says.
        metadata: of the file.
    """

    layers_TKX: list[Tensor]
    checksums: list[int]
    metadata: dict[str, str]


def checksum(layer: Tensor) -> int:
    """CRC-32 of a contiguous tensor on the host."""
    return zlib.crc32(layer.flatten().view(torch.uint8).numpy().data)


def write_layers(
    path: Path, layers_TKX: Sequence[Tensor], *, key: str, name: str, more: Mapping[str, str], mode: int
) -> None:
    """Write a file, completely or not at all.

    Args:
        name: for people.
        more: other metadata.
        mode: its permissions.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {f"layer.{number}": layer.contiguous().cpu() for number, layer in enumerate(layers_TKX)}
    sums = json.dumps([checksum(layer) for layer in tensors.values()])
    about = {"format": FORMAT, "key": key, "segment": name, "crc32": sums}
    write_whole(path, save(tensors, metadata=about | dict(more)), mode=mode)


def read_metadata(path: Path) -> dict[str, str] | None:
    """Metadata of a file; None if it is missing, cut off, or not such a file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return None
    return metadata if metadata.get("format") == FORMAT else None


def read_layers(path: Path, *, key: str, shapes: Sequence[KVShape], num_tokens: int) -> StoredLayers | None:
    """Map a file; None if it is missing, damaged, or of other tokens or another model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get("format") != FORMAT or metadata.get("key") != key:
                return None
            names = [f"layer.{number}" for number in range(len(shapes))]
            if set(file.keys()) != set(names):
                return None
            layers = [file.get_tensor(name) for name in names]
    except (OSError, SafetensorError):
        return None
    for layer, shape in zip(layers, shapes, strict=True):
        expected = (num_tokens, shape.num_kv_heads, shape.key_dim + shape.value_dim)
        if tuple(layer.shape) != expected or layer.dtype != shape.dtype:
            return None
    try:
        sums = json.loads(metadata.get("crc32", "null"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(sums, list) or len(sums) != len(layers):
        return None
    return StoredLayers(layers_TKX=layers, checksums=sums, metadata=metadata)
