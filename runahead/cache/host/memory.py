"""Page-locked host memory that GPU kernels read directly.

A tensor in page-locked memory has an address that is valid on the GPU too, so a kernel there can gather rows of it over
the link: only the chosen rows are copied, and the host does not wait for the indices.

Page-locking takes 0.2 to 0.4 s per GB, so memory that nobody has any longer stays locked for the next who asks.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def host_empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, before_free: Callable[[], None] = lambda: None
) -> Tensor:
    """An uninitialised tensor in host memory, page-locked where `device` is a GPU.

    Args:
        before_free: called when the host has dropped the memory; returns once no copy uses it either.

    Raises:
        ValueError: the memory cannot be allocated.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        if device.type != "cuda" or num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        block = _arena.take(num_bytes, device)
        lease = memoryview(block)[:num_bytes]
        weakref.finalize(lease, _arena.give_back, block, device, before_free).atexit = False
        return torch.frombuffer(lease, dtype=dtype).view(shape)
    except (OSError, RuntimeError) as error:  # torch.AcceleratorError and torch.OutOfMemoryError are RuntimeErrors
        raise ValueError(
            f"{num_bytes:,} bytes of KV cache do not fit into page-locked host memory; use a shorter prompt, a "
            "smaller prompt.batch or policy.pool.bytes, or raise the limit (ulimit -l)"
        ) from error


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A contiguous page-locked tensor as a tensor of `device` over the same memory; on a CPU the tensor itself.

    With unified addresses, which CUDA has on 64-bit Linux, page-locked memory has the same address on both sides.
    """
    if device.type != "cuda":
        return host
    if host.numel() == 0:
        return host.to(device)
    assert host.is_pinned() and host.is_contiguous(), "only page-locked memory has an address on the GPU"
    with torch.cuda.device(device):
        mapped = torch.as_tensor(_Bytes(host), device=device)
    return mapped.view(host.dtype).view(host.shape)


class _PageLocked(mmap.mmap):
    """Page-locked memory of exactly the requested size; torch's own rounds up to a power of two, up to twice that."""

    _address = 0

    def lock(self) -> None:
        """Page-lock the memory. Raises: RuntimeError."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if hasattr(mmap, "MADV_DONTFORK"):  # a child's copy on write would move pages that a GPU is writing to
            self.madvise(mmap.MADV_DONTFORK)
        status = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if status:
            raise RuntimeError(f"cudaHostRegister failed with error {status}")
        self._address = address

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)


class _Arena:
    """The page-locked memory of this process, by GPU. It grows with what is in use at once, and does not shrink."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[_PageLocked]] = {}
        self._lock = threading.RLock()  # memory may be given back wherever Python collects garbage

    def take(self, num_bytes: int, device: torch.device) -> _PageLocked:
        """The smallest free block of at least this size; if there is none, a new one instead of all free ones."""
        with self._lock:
            free = self._free.setdefault(device, [])
            fitting = [block for block in free if len(block) >= num_bytes]
            if fitting:
                best = min(fitting, key=len)
                self._free[device] = [block for block in free if block is not best]
                return best
            del free, fitting
            self._free[device] = []
        with torch.cuda.device(device):
            block = _PageLocked(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.lock()
        return block

    def give_back(self, block: _PageLocked, device: torch.device, before_free: Callable[[], None]) -> None:
        before_free()
        with self._lock:
            self._free[device].append(block)


_arena = _Arena()


class _Bytes:
    """A tensor's memory as bytes, by the CUDA array interface, which has no bfloat16."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # keeps the memory alive
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
