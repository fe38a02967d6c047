"""Keys and values of a segment's stored tokens, and their file format.

A file is in safetensors format with one tensor per layer. It is read by mapping, so what is not used stays on disk. Its
metadata name the model and the tokens that it was made for; a damaged file, or one of another model or other tokens,
counts as absent. They have a checksum of each layer, too, for those who read all of it.
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
class SegmentKV:
    """Keys and values of a segment.

    Attributes:
        layers_TKX: keys and values of each layer, (T, K, H + V), by ascending position.
        checksums: of each layer, as its file says; None if there is no file that does.
        is_packed: the layers are records of few bits (`KVRecords`).
    """

    layers_TKX: list[Tensor]
    checksums: list[int] | None = None
    is_packed: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers_TKX)

    def to(self, device: torch.device, *, pin_memory: bool = False) -> SegmentKV:
        """A copy on a device; `pin_memory` page-locks host memory."""
        layers = []
        for layer in self.layers_TKX:
            copy = torch.empty(layer.shape, dtype=layer.dtype, device=device, pin_memory=pin_memory)
            layers.append(copy.copy_(layer, non_blocking=True))
        return SegmentKV(layers_TKX=layers, is_packed=self.is_packed)


def checksum(layer: Tensor) -> int:
    """CRC-32 of a contiguous tensor on the host."""
    return zlib.crc32(layer.flatten().view(torch.uint8).numpy().data)


def write_segment(path: Path, kv: SegmentKV, *, key: str, name: str, more: Mapping[str, str] | None = None) -> None:
    """Write a segment's file, completely or not at all.

    Args:
        more: other metadata.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {f"layer.{number}": layer.contiguous().cpu() for number, layer in enumerate(kv.layers_TKX)}
    sums = json.dumps([checksum(layer) for layer in tensors.values()])
    about = {"format": FORMAT, "key": key, "segment": name, "crc32": sums}
    write_whole(path, save(tensors, metadata=about | dict(more or {})))


def read_metadata(path: Path) -> dict[str, str] | None:
    """Metadata of a segment's file; None if it is missing, cut off, or not such a file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return None
    return metadata if metadata.get("format") == FORMAT else None


def read_segment(path: Path, *, key: str, shapes: Sequence[KVShape], num_tokens: int) -> SegmentKV | None:
    """Map a segment's file; None if it is missing, damaged, or of other tokens or another model."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
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
    return SegmentKV(layers_TKX=layers, checksums=_checksums(metadata.get("crc32"), len(layers)))


def _checksums(text: str | None, num_layers: int) -> list[int] | None:
    try:
        sums = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return sums if isinstance(sums, list) and len(sums) == num_layers else None
