"""The calls of the CUDA driver that torch has no name for: memory between processes, and counters on streams.

torch shares memory, too (torch.multiprocessing), but in pieces of its caching allocator, with reference counts in named
files that a killed process leaves behind; and its symmetric memory can write a counter on a stream, but not wait for
one. The driver is there wherever torch finds a GPU. All calls use the context that is current in this thread, which is
torch's.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from runahead.ranks.mapped.memory import HANDLE_BYTES, Unmapped

GEQ = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until (int32) (value at the address - number) >= 0, so counters may wrap around."""

HOST_REGISTER_FLAGS = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTREGISTER_DEVICEMAP."""

LAZY_ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@lru_cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unmapped(f"the CUDA driver cannot be loaded ({error})") from error


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises: Unmapped."""
    try:
        function = getattr(_library(), name)
    except AttributeError as error:
        raise Unmapped(f"this CUDA driver has no {name}") from error
    if (status := function(*arguments)) != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise Unmapped(f"{name}: {(text.value or b'unknown error').decode()}")


def stream_wait_value(stream: int, address: int, number: int) -> None:
    """Let a stream wait for a counter in page-locked host memory."""
    value = ctypes.c_uint32(number & 0xFFFFFFFF)
    _call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(_device_address(address)), value, GEQ)


def stream_write_value(stream: int, address: int, number: int) -> None:
    """Let a stream write a counter in page-locked host memory, after a barrier for all that was written before."""
    value = ctypes.c_uint32(number & 0xFFFFFFFF)
    _call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(_device_address(address)), value, 0)


def copy(stream: int, target: int, source: int, num_bytes: int) -> None:
    """Queue a copy between any two addresses of devices."""
    size = ctypes.c_size_t(num_bytes)
    _call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), size, ctypes.c_void_p(stream))


_registered: list[tuple[int, int, int]] = []
"""(address on the host, bytes, address on the device) of memory that was page-locked here."""


def register(address: int, num_bytes: int) -> None:
    """Page-lock host memory, so that streams can wait for counters in it. It stays so until the process ends.

    Raises:
        Unmapped: the driver refuses.
    """
    _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), HOST_REGISTER_FLAGS)
    on_device = ctypes.c_uint64()
    try:
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_device), ctypes.c_void_p(address), 0)
    except Unmapped:
        _call("cuMemHostUnregister", ctypes.c_void_p(address))
        raise
    _registered.append((address, num_bytes, on_device.value))


@lru_cache(maxsize=4096)
def _device_address(address: int) -> int:
    for begin, num_bytes, on_device in _registered:
        if begin <= address < begin + num_bytes:
            return on_device + address - begin
    raise ValueError("not in page-locked memory")


def allocate(num_bytes: int) -> tuple[int, bytes]:
    """Device memory that other processes can map: (address, handle).

    Raises:
        Unmapped: there is not as much memory, or the driver gives no handle for it.
    """
    address, handle = ctypes.c_uint64(), Handle()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except Unmapped as error:
        free(address.value)
        raise Unmapped(
            f"this GPU's memory cannot be exported to other processes, as in a MIG slice, a virtual GPU, WSL and some "
            f"containers: {error}"
        ) from error
    return address.value, bytes(handle)


def free(address: int) -> None:
    """Free memory of `allocate`, which no process has mapped any more."""
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def open_handle(handle: bytes) -> int:
    """Map another process's memory, also of another GPU that this one can access. Raises: Unmapped."""
    address = ctypes.c_uint64()
    made = Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), made, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
