"""Reader of a GGUF file's header: its metadata, and a check that the file is complete.

The format is specified in the ggml project (docs/gguf.md). transformers reads the weights, which takes seconds; this
reads what must be known before.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by value type of the metadata."""


@dataclass(kw_only=True)
class GGUFHeader:
    """Header of a GGUF file: `metadata` by key; by name of every tensor its type, such as F16 or Q4_1, and its size."""

    metadata: dict[str, Any]
    tensors: dict[str, str]
    num_elements: dict[str, int]


def read_header(path: Path) -> GGUFHeader:
    """Read the header, and check that the file is as long as the header says.

    Raises:
        ValueError: it is not a GGUF file, or it is damaged or truncated.
    """
    # Imported here, so that a machine without this package takes all other checkpoints.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("it does not begin like a GGUF file")
            if (version := _scalar(file, "I")) not in (2, 3):
                raise ValueError(f"GGUF version {version} is not supported")
            num_tensors, num_keys = _scalar(file, "Q"), _scalar(file, "Q")
            metadata = {_text(file): _value(file, _scalar(file, "I")) for _ in range(num_keys)}
            tensors, sizes, end = {}, {}, 0
            for _ in range(num_tensors):
                name, num_elements = _text(file), 1
                for _ in range(_scalar(file, "I")):
                    num_elements *= _scalar(file, "Q")
                form = GGMLQuantizationType(_scalar(file, "I"))
                tensors[name], sizes[name] = form.name, num_elements
                block, block_bytes = GGML_QUANT_SIZES[form]
                end = max(end, _scalar(file, "Q") + num_elements // block * block_bytes)
            alignment = metadata.get("general.alignment", 32)
            end += -(-file.tell() // alignment) * alignment
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, KeyError) as error:
        raise ValueError("its header is broken") from error
    if path.stat().st_size < end:
        raise ValueError(f"it has {path.stat().st_size} bytes of {end}")
    return GGUFHeader(metadata=metadata, tensors=tensors, num_elements=sizes)


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]


def _text(file: BinaryIO) -> str:
    length = _scalar(file, "Q")
    data = file.read(length)
    if len(data) < length:
        raise struct.error("cut short")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _text(file)
    if kind == ARRAY:
        kind, length = _scalar(file, "I"), _scalar(file, "Q")
        if kind in SCALARS:
            code = f"<{length}{SCALARS[kind]}"
            return list(struct.unpack(code, file.read(struct.calcsize(code))))
        return [_value(file, kind) for _ in range(length)]
    return _scalar(file, SCALARS[kind])
