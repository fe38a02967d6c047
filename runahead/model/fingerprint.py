"""Fingerprint of a model's weights, from samples of them; shares of a model find the whole model's together.

A checkpoint has a digest of its own, which other engines can compute from its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runahead.model.loading.sharing import copies_of_heads
from runahead.model.parts import is_laid_out, local_part

FINGERPRINT_SAMPLES = 64
"""Number of values of each parameter that the fingerprint covers, spread evenly over the parameter."""


SAMPLE_BYTES = 64
"""Bytes at each of three places of a stored tensor that the digest of a checkpoint covers."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of one parameter: its name, shape and dtype, the values as float32, and which of them this rank has."""

    about: str
    values: Tensor
    there: Tensor


@torch.inference_mode()
def model_fingerprint(module: nn.Module) -> str:
    """Compute the fingerprint: 32 hexadecimal digits from each parameter's name, shape, dtype and some of its values.

    The same weights have the same fingerprint on every device, but another one in another dtype, since what is
    computed from them differs. Of a share of a model it is that of the share's own weights.
    """
    samples = []
    for name, parameter in module.named_parameters():
        own = local_part(parameter)
        flat = own.detach().reshape(-1)
        values = flat[_places(flat.numel()).to(flat.device)].float().cpu()
        about = f"{name} {tuple(own.shape)} {own.dtype}"
        samples.append(Samples(about=about, values=values, there=torch.ones(len(values), dtype=torch.bool)))
    return whole_fingerprint([samples])


@torch.inference_mode()
def samples_of_share(module: nn.Module) -> list[Samples]:
    """This rank's samples of the whole model's parameters, of which it has a part."""
    copies, samples = copies_of_heads(module), []
    for name, parameter in module.named_parameters():
        shape, own = list(parameter.shape), local_part(parameter)
        dim, held = _held(parameter)
        if name in copies:  # each head is there several times
            times, rows_of_head = copies[name]
            shape[0] //= times
            held = held // (rows_of_head * times) * rows_of_head + held % rows_of_head
        places = list(torch.unravel_index(_places(torch.Size(shape).numel()), shape))
        position = torch.full((shape[dim],), -1)
        position[held] = torch.arange(len(held))
        places[dim] = position[places[dim]]
        there = places[dim] >= 0
        values = own.detach()[tuple(place.clamp_min(0).to(own.device) for place in places)].float().cpu()
        about = f"{name} {tuple(shape)} {own.dtype}"
        samples.append(Samples(about=about, values=values, there=there))
    return samples


def whole_fingerprint(shares: Sequence[Sequence[Samples]]) -> str:
    """Fingerprint of the samples that all shares have together."""
    digest = hashlib.sha256()
    for of_parameter in zip(*shares, strict=True):
        values, there = of_parameter[0].values.clone(), of_parameter[0].there.clone()
        for samples in of_parameter[1:]:
            values = torch.where(there, values, samples.values)
            there |= samples.there
        assert there.all(), of_parameter[0].about
        digest.update(of_parameter[0].about.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]


def with_changes(weights: str, *changes: str) -> str:
    """Fingerprint of weights and of what a model has beside them or in them; "" is no change."""
    for change in filter(None, changes):
        weights = hashlib.sha256(f"{weights} {change}".encode()).hexdigest()[:32]
    return weights


def checkpoint_digest(files: Sequence[Path]) -> str:
    """Digest of the safetensors files of a checkpoint: 64 hexadecimal digits, the same however they are cut.

    It covers each tensor's name, dtype, shape and 64 bytes at its beginning, middle and end.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        tensors |= {name: (path, 8 + length, each) for name, each in header.items() if name != "__metadata__"}
    digest = hashlib.sha256()
    for name in sorted(tensors, key=str.encode):
        path, first, about = tensors[name]
        start, end = about["data_offsets"]
        digest.update(f"{name} {about['dtype']} {json.dumps(about['shape'])}\n".encode())
        with path.open("rb") as file:
            for at in (0, (end - start) // 2, max(0, end - start - SAMPLE_BYTES)):
                file.seek(first + start + at)
                digest.update(file.read(min(SAMPLE_BYTES, end - start - at)))
    return digest.hexdigest()


def _places(num_elements: int) -> Tensor:
    count = min(FINGERPRINT_SAMPLES, num_elements)
    return torch.linspace(0, max(0, num_elements - 1), count, dtype=torch.float64).long()


def _held(parameter: Tensor) -> tuple[int, Tensor]:
    """The dim that a parameter is split along, and the indices along it that this rank has."""
    if not is_laid_out(parameter):
        return 0, torch.arange(parameter.shape[0])
    from torch.distributed.tensor import Replicate, distribute_tensor

    placement: Any = parameter.placements[0]
    if isinstance(placement, Replicate):
        return 0, torch.arange(parameter.shape[0])
    factor = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    dim = placement.dim % parameter.ndim
    index = torch.arange(parameter.shape[dim], device=parameter.device_mesh.device_type)
    laid = distribute_tensor(index, parameter.device_mesh, [type(placement)(0, **factor)], src_data_rank=None)
    return dim, laid.to_local().cpu()
