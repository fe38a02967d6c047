"""A file with the keys and values of one prompt, which is read layer by layer and compared with its checksums.

In safetensors format, `layer.0` and so on in this order, each (T - first, K, H + V): keys, after RoPE, and values of a
token and a head side by side. The file has its name once it is complete, so what is damaged will never become whole.

It is read, not mapped: a mapped file that somebody cuts off ends the process with SIGBUS.
"""

# Legend: T tokens of the prompt, K kv heads of the whole model, H key dims, V value dims, X = H + V.

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

FORMAT = "runahead segment 1"
NAMED_AS = b"runahead handover 1\0"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_HEADER_BYTES = 16 << 20
"""A header of 1,000 layers has 150 KB."""


def file_name(key: str, salt: str, ids: Sequence[int]) -> str:
    """Name of the file of exactly these tokens; `key` and `salt` as the server says them."""
    numbers = array("q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    digest = hashlib.sha256(NAMED_AS + key.encode() + b"\0" + salt.encode() + b"\0" + numbers.tobytes())
    return f"{digest.hexdigest()}.safetensors"


@dataclass(frozen=True)
class Layer:
    """The place of a layer in a file.

    Attributes:
        at: its first byte in the file.
        shape: (T - first, K, X).
        first: token of its first row; later than 0 for a window layer of which the end alone is there.
        crc32: of its bytes.
    """

    at: int
    num_bytes: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    first: int
    crc32: int


class PromptFile:
    """An open file; one that is removed meanwhile stays readable.

    Attributes:
        num_tokens: of its prompt.
        model: the server's word for the model that computed it.
    """

    def __init__(self, path: Path) -> None:
        """Raises: FileNotFoundError: absent. OSError: not readable. ValueError: damaged, in words."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_header(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PromptFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def require(self, *, num_tokens: int, num_layers: int, model: str) -> None:
        """Raises: ValueError: it is of another prompt or model."""
        if self.model != model:
            raise ValueError("it is of a model that the server did not have when vLLM was started; start vLLM anew")
        if (self.num_tokens, len(self.layers)) != (num_tokens, num_layers):
            has, wanted = f"{self.num_tokens} tokens of {len(self.layers)}", f"{num_tokens} of {num_layers}"
            raise ValueError(f"it has {has} layers, wanted are {wanted}")

    def read(self, number: int, buffer: Tensor) -> Tensor:
        """A layer, (T - first, K, X), as a view of `buffer`, which the next one may overwrite.

        Args:
            buffer: of uint8, on the host, as large as the largest layer.

        Raises:
            OSError: it cannot be read.
            ValueError: it is cut off, or its checksum differs.
        """
        layer = self.layers[number]
        part = buffer[: layer.num_bytes]
        view = memoryview(part.numpy().data)
        self._fill(view, layer.at, f"layer {number}")
        if zlib.crc32(view) != layer.crc32:
            raise ValueError(f"the checksum of layer {number} differs")
        return part.view(layer.dtype).view(layer.shape)

    def _fill(self, view: memoryview, at: int, what: str) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], at + done)
            if count == 0:
                raise ValueError(f"it is cut off in {what}")
            done += count

    def _read_header(self, path: Path) -> None:
        length = bytearray(8)
        self._fill(memoryview(length), 0, "its header")
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > MOST_HEADER_BYTES:
            raise ValueError(f"its header says that it has {num_bytes} bytes")
        text = bytearray(num_bytes)
        self._fill(memoryview(text), 8, "its header")
        try:
            header = json.loads(bytes(text))
            about = header.pop("__metadata__")
            sums, first = json.loads(about["crc32"]), json.loads(about["first"])
            said, self.num_tokens, self.model = about["format"], int(about["tokens"]), str(about["model"])
            entries = [header.pop(f"layer.{number}") for number in range(len(header))]
            begin = 8 + num_bytes
            self.layers = [
                _layer(begin, entry, first=at, crc32=crc, num_tokens=self.num_tokens)
                for entry, at, crc in zip(entries, first, sums, strict=True)
            ]
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"its header is not one of a handed-over prompt ({type(error).__name__}: {error})"
            ) from error
        if said != FORMAT:
            raise ValueError(f"its format is {said!r}, not {FORMAT!r}; take like versions of both sides")
        if about.get("key") != path.stem:
            raise ValueError("it was made under another name")
        end = begin
        for number, layer in enumerate(self.layers):
            if layer.at != end:
                raise ValueError(f"layer {number} is not behind the one before it")
            end += layer.num_bytes
        size = os.fstat(self._file).st_size
        if size != end:
            raise ValueError(f"it has {size} bytes, and its header says {end}")


def _layer(begin: int, entry: Any, *, first: Any, crc32: Any, num_tokens: int) -> Layer:
    """A layer of the header. Raises: KeyError, TypeError, ValueError: it does not fit together."""
    rows, heads, dims = (int(size) for size in entry["shape"])
    start, end = (int(place) for place in entry["data_offsets"])
    dtype = DTYPES[entry["dtype"]]
    if min(rows, heads, dims) < 1 or int(first) < 0 or rows + int(first) != num_tokens:
        raise ValueError(f"{rows} rows from token {first} on, {heads} heads and {dims} dims of {num_tokens} tokens")
    if end - start != prod((rows, heads, dims)) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for {rows} x {heads} x {dims} numbers of {dtype}")
    return Layer(begin + start, end - start, (rows, heads, dims), dtype, int(first), int(crc32))
