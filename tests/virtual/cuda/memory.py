"""Memory of the virtual GPU, and page-locked memory of the host: how much there is, and which."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

TOTAL_BYTES = 80 << 30
NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED."""


class DeviceMemory:
    """Bytes of the storages that tensors of the GPU hold; what kernels need in between is not counted."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self.allocated_bytes = self.peak_bytes = 0

    def hold(self, storage: UntypedStorage) -> Lease:
        """Count a storage until all its leases are gone."""
        key, num_bytes = storage._cdata, storage.nbytes()
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.allocated_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return Lease(self, key, num_bytes)

    def drop(self, key: int, num_bytes: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.allocated_bytes -= num_bytes


class Lease:
    """A tensor's share in a storage, which ends with the tensor."""

    def __init__(self, memory: DeviceMemory, key: int, num_bytes: int) -> None:
        self._memory, self._key, self._num_bytes = memory, key, num_bytes

    def __del__(self) -> None:
        self._memory.drop(self._key, self._num_bytes)


class PageLocked:
    """Page-locked memory: that of torch's allocator, and what was registered by its address."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def own(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory as page-locked by torch, as long as it lives; return the tensor."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    def has(self, tensor: Tensor) -> bool:
        return self.covers(tensor.data_ptr())

    def covers(self, address: int) -> bool:
        self._purge()
        ranges = self._registered | {begin: num_bytes for begin, (_, num_bytes) in self._storages.items()}
        return any(begin <= address < begin + num_bytes for begin, num_bytes in ranges.items())

    def stats(self) -> dict[str, int]:
        """Stands for torch.cuda.host_memory_stats, which knows torch's own alone; torch rounds up to a power of two."""
        self._purge()
        sizes = [num_bytes for _, num_bytes in self._storages.values()]
        return {"allocated_bytes.current": sum(1 << (size - 1).bit_length() for size in sizes if size)}

    def _purge(self) -> None:
        self._storages = {begin: each for begin, each in self._storages.items() if not each[0].expired()}

    # The names of CUDA's runtime, as torch.cuda.cudart() has them.

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self._registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self._registered.pop(address, None) is not None else NOT_REGISTERED


DEVICE, HOST = DeviceMemory(), PageLocked()


def at_address(given: Any) -> Tensor:
    """A CPU tensor over the bytes of an object with a CUDA array interface, which it keeps alive."""
    interface = given.__cuda_array_interface__
    assert interface["typestr"] == "|u1" and interface["strides"] is None, interface
    [num_bytes], address = interface["shape"], interface["data"][0]
    block = (ctypes.c_uint8 * num_bytes).from_address(address)
    block.owner = given
    return torch.frombuffer(block, dtype=torch.uint8)
