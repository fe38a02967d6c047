"""Memory of the host that a GPU reads on its own.

A tensor in page-locked memory has an address that is valid on the GPU too, so a kernel there can gather rows of it over
the link: nothing is copied that was not asked for, and the host does not wait for the indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor in host memory, page-locked where `device` is a GPU.

    Raises:
        ValueError: there is no room for it.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:  # torch.AcceleratorError and torch.OutOfMemoryError are RuntimeErrors
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        raise ValueError(
            f"{num_bytes:,} bytes of K,V do not fit into host memory; use a shorter prompt or a smaller prompt.batch"
        ) from error


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """The same contiguous memory as `device` sees it; on a CPU that is the tensor itself."""
    if device.type != "cuda":
        return host
    if host.numel() == 0:
        return host.to(device)
    assert host.is_pinned() and host.is_contiguous(), "only page-locked memory has an address on the GPU"
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_Bytes(host), device=device)
    return mapped.view(host.dtype).view(host.shape)


class _Bytes:
    """A tensor's memory by the CUDA array interface, as plain bytes since that knows no bfloat16."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # keeps the memory alive
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
