"""The file format of keys and values.

A file is in safetensors format with one tensor per layer, and is read by mapping. Its metadata have a checksum of each
layer, and name the model and the tokens that it was made for. A damaged file, or one of another model or other tokens,
counts as absent. Layers are written one by one, as soon as each is there; the file's name comes last.
"""

# Legend: T stored tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runahead.attention.op import nothing
from runahead.cache.slabs import KVShape
from runahead.files import write_whole

FORMAT = "runahead segment 1"

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
    torch.bool: "BOOL",
}
"""Names of dtypes in a header: of keys and values, of records, of states and of clusters."""

LENGTH_BYTES = 8
"""Bytes of the header's length, before it."""

ALIGNED = 8
"""Bytes of whose multiple the header's length is, so that mapped numbers are aligned."""

LARGEST_SUM = 2**32 - 1
"""The checksum with the most digits."""


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
    return zlib.crc32(_bytes_of(layer))


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape and dtype of a layer in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileHead:
    """The facts of a file that are known before its numbers are.

    Attributes:
        shapes: of its layers.
        name: for people.
        more: other metadata.
    """

    shapes: Sequence[LayerShape]
    key: str
    name: str
    more: Mapping[str, str]

    def header(self, sums: Sequence[int]) -> bytes:
        """The header without its length.

        Args:
            sums: checksums of the layers.
        """
        about = {"format": FORMAT, "key": self.key, "segment": self.name, "crc32": json.dumps(sums)}
        described: dict[str, object] = {"__metadata__": about | dict(self.more)}
        at = 0
        for number, each in enumerate(self.shapes):
            end = at + each.num_bytes
            offsets = {"dtype": DTYPES[each.dtype], "shape": each.shape, "data_offsets": [at, end]}
            described[f"layer.{number}"], at = offsets, end
        return json.dumps(described, separators=(",", ":")).encode()

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of the header with any checksums."""
        most = len(self.header([LARGEST_SUM] * len(self.shapes)))
        return most + -most % ALIGNED

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return LENGTH_BYTES + self.header_bytes + sum(each.num_bytes for each in self.shapes)


def write_layers(
    path: Path,
    layers_TKX: Iterable[Tensor],
    *,
    head: FileHead,
    mode: int,
    approve: Callable[[], object] = nothing,
) -> None:
    """Write a file, completely or not at all.

    Args:
        layers_TKX: read one by one, and again from the first one if the file has to be written another way.
        mode: its permissions.
        approve: called once all layers are written, before the file has its name. If it raises, there is none.

    Raises:
        OSError: it cannot be written.
        Exception: what reading a layer or `approve` raises.
    """

    def fill(file: BinaryIO) -> None:
        sums, length = list[int](), head.header_bytes
        file.seek(LENGTH_BYTES + length)
        for layer_TKX, expected in zip(layers_TKX, head.shapes, strict=True):
            assert (tuple(layer_TKX.shape), layer_TKX.dtype) == (expected.shape, expected.dtype), (layer_TKX, expected)
            data = _bytes_of(layer_TKX.contiguous().cpu())
            sums.append(zlib.crc32(data))
            file.write(data)
        file.seek(0)
        file.write(length.to_bytes(LENGTH_BYTES, "little") + head.header(sums).ljust(length))
        approve()

    write_whole(path, fill, mode=mode)


def _bytes_of(layer: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, as they are there."""
    data: memoryview = layer.flatten().view(torch.uint8).numpy().data
    return data


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
