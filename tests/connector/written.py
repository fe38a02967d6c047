"""Files of handed-over prompts as another program would write them: with safetensors' own writer."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runahead_vllm.prompt_file import file_name

KEY, SALT = "the model", "the salt"


def write(
    folder: Path, ids: list[int], layers_TKX: list[Tensor], *, first: list[int] | None = None, model: str = KEY
) -> Path:
    """Write the file of a prompt: it has its name when it is complete."""
    name = file_name(KEY, SALT, ids)
    sums = [zlib.crc32(layer.contiguous().view(torch.uint8).numpy().tobytes()) for layer in layers_TKX]
    metadata = {
        "format": "runahead segment 1",
        "key": name.removesuffix(".safetensors"),
        "segment": "handover",
        "crc32": json.dumps(sums),
        "first": json.dumps(first or [0] * len(layers_TKX)),
        "tokens": str(len(ids)),
        "model": model,
    }
    # safetensors orders tensors of one dtype by name: "layer.10" before "layer.2".
    assert len(layers_TKX) <= 10, "the names of more layers would be out of order"
    part = folder / f".{name}.part"
    tensors = {f"layer.{number}": layer.contiguous() for number, layer in enumerate(layers_TKX)}
    save_file(tensors, part, metadata=metadata)
    part.chmod(0o600)
    return part.rename(folder / name)


def numbers(ids: list[int], num_layers: int = 3, heads: int = 2, dims: int = 6) -> list[Tensor]:
    """Layers whose every number says where it belongs."""
    size = (len(ids), heads, dims)
    return [torch.arange(len(ids) * heads * dims).view(size).float() + 10_000 * number for number in range(num_layers)]
