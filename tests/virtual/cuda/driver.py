"""The CUDA driver of the virtual GPU: memory that processes share, and streams that wait for counters.

`Driver` takes libcuda's place in runahead/ranks/mapped/cuda_driver.py, whose calls arrive with C's widths. What CUDA
refuses is refused here: copies beyond an allocation, counters in memory that is not page-locked, handles that a process
opens of its own memory. So is what CUDA leaves undefined: to free memory that another process has mapped. Device memory
that is new or free holds ones in all bits, which are NaN in every floating dtype.

A stream does what it is told at once, as everywhere on the virtual GPU, until it has to wait for a counter. Then the
default stream, on which ranks compute, lets the host wait; any other stream goes on in a thread, and its copies,
counters and events keep their order. Kernels on such a stream do not wait.
"""

# ruff: noqa: N802 (names of the driver)

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runahead.ranks.mapped import cuda_driver
from runahead.ranks.mapped.memory import Cell, SharedBytes, Unmapped, map_other
from runahead.ranks.mapped.queues import HostQueue
from tests.virtual.cuda.captures import CAPTURING
from tests.virtual.cuda.memory import HOST, NOT_REGISTERED

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE, LAUNCH_FAILED = 1, 2, 201, 400, 401, 719
NOT_SUPPORTED = 801
ERRORS = {
    INVALID_VALUE: b"invalid argument",
    OUT_OF_MEMORY: b"out of memory",
    INVALID_CONTEXT: b"invalid device context",
    INVALID_HANDLE: b"invalid resource handle",
    ILLEGAL_STATE: b"the operation cannot be performed in the present state",
    NOT_REGISTERED: b"pointer does not correspond to a registered memory region",
    LAUNCH_FAILED: b"unspecified launch failure",
    NOT_SUPPORTED: b"operation not supported",
}
"""CUresult, and the driver's words for it."""

ON_DEVICE = 1 << 48
"""Offset that is added to the address of page-locked memory to get the device's, so that the two are not mixed up."""

MAPPINGS_BYTES = 8
"""Behind an allocation: the number of other processes that have it mapped."""

DEFAULT_STREAM = 0
UNSET = 0xFF
WAIT_S = 0.05


class Happening:
    """Something that a stream comes to; streams wait for it as for a counter."""

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self.set = self._has_come.set

    def reached(self, number: int) -> bool:
        return self._has_come.is_set()

    def wait(self, number: int, block_s: float | None) -> bool:
        return self._has_come.wait(block_s)


class Driver:
    """The driver's functions in one process. Each returns a CUresult."""

    def __init__(self) -> None:
        self._own: dict[int, SharedBytes] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._queues: dict[int, HostQueue] = {}

    # Streams.

    def queue(
        self,
        stream: int,
        task: Callable[[], None],
        waits: Sequence[tuple[Cell | Happening, int]] = (),
        *,
        may_block: bool = False,
    ) -> None:
        """Let a stream wait for counters to reach numbers, and then do something."""

        def wait_and_do() -> None:
            for each, number in waits:
                while not each.wait(number, WAIT_S):
                    pass
            task()

        if CAPTURING.capture is not None:
            CAPTURING.capture.queue(stream, wait_and_do)
            return
        if stream == DEFAULT_STREAM:
            wait_and_do()
            return
        if stream not in self._queues:
            self._queues[stream] = HostQueue(f"virtual stream {stream}", None)  # type: ignore[arg-type]
        self._queues[stream]._submit(waits, task, [], may_block=may_block)  # type: ignore[arg-type]

    def drain(self) -> None:
        """Wait until all streams have done what they were told."""
        for stream in list(self._queues):
            self.settle(stream)

    def settle(self, stream: int) -> None:
        """Wait until a stream has done what it was told."""
        if stream in self._queues:
            done = Happening()
            self.queue(stream, done.set)
            while self._queues[stream].error is None and not done.wait(0, WAIT_S):
                pass

    def _status(self, stream: int) -> int:
        return LAUNCH_FAILED if stream in self._queues and self._queues[stream].error is not None else 0

    def cuStreamWaitValue32_v2(self, stream: Any, address: Any, value: Any, flags: int) -> int:
        cell = self._cell(address.value)
        if cell is None or flags != cuda_driver.GEQ:
            return INVALID_VALUE
        self.queue(stream.value or 0, lambda: None, [(cell, value.value)])
        return self._status(stream.value or 0)

    def cuStreamWriteValue32_v2(self, stream: Any, address: Any, value: Any, flags: int) -> int:
        cell = self._cell(address.value)
        if cell is None or flags != 0:
            return INVALID_VALUE
        self.queue(stream.value or 0, lambda: cell.set(value.value))
        return self._status(stream.value or 0)

    def cuMemcpyAsync(self, target: Any, source: Any, num_bytes: Any, stream: Any) -> int:
        begin, end = target.value, target.value + num_bytes.value

        def is_mapped() -> bool:
            mapped = [(start, len(memory) - MAPPINGS_BYTES) for start, memory in self._mapped.items()]
            return any(start <= begin and end <= start + num_mapped for start, num_mapped in mapped)

        def move() -> None:
            assert is_mapped(), "a copy was under way to memory that has been unmapped"
            ctypes.memmove(begin, source.value, num_bytes.value)

        if not is_mapped():
            return INVALID_VALUE
        self.queue(stream.value or 0, move)
        return self._status(stream.value or 0)

    # Host memory.

    def cuMemHostRegister_v2(self, address: Any, num_bytes: Any, flags: int) -> int:
        if flags != cuda_driver.HOST_REGISTER_FLAGS:
            return INVALID_VALUE
        return HOST.cudaHostRegister(address.value, num_bytes.value, flags)

    def cuMemHostUnregister(self, address: Any) -> int:
        return HOST.cudaHostUnregister(address.value)

    def cuMemHostGetDevicePointer_v2(self, on_device: Any, address: Any, flags: int) -> int:
        if flags != 0 or not HOST.covers(address.value):
            return INVALID_VALUE
        on_device._obj.value = address.value + ON_DEVICE
        return 0

    def _cell(self, address: int) -> Cell | None:
        """The counter at a device's address of page-locked memory."""
        host = address - ON_DEVICE
        if host % 4 != 0 or not HOST.covers(host):
            return None
        return Cell(np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(host)), 0)

    # Device memory.

    def cuMemAlloc_v2(self, address: Any, num_bytes: Any) -> int:
        try:
            made = SharedBytes(-(-num_bytes.value // MAPPINGS_BYTES) * MAPPINGS_BYTES + MAPPINGS_BYTES)
        except Unmapped:
            return OUT_OF_MEMORY
        address._obj.value = self._map(made.memory)
        self._own[address._obj.value] = made
        return self._fill(address._obj.value)

    def cuMemFree_v2(self, address: Any) -> int:
        if address.value not in self._own:
            return INVALID_VALUE
        if _mappings(self._mapped[address.value])[0] > 0:
            return ILLEGAL_STATE
        self._fill(address.value)
        del self._own[address.value], self._mapped[address.value]
        return 0

    def _map(self, memory: mmap.mmap) -> int:
        begin = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._mapped[begin] = memory
        return begin

    def _fill(self, address: int) -> int:
        ctypes.memset(address, UNSET, len(self._mapped[address]) - MAPPINGS_BYTES)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        made = self._own.get(address.value)
        if made is None:
            return INVALID_VALUE
        packed = struct.pack("<QQQ", os.getpid(), made.descriptor, made.num_bytes)
        ctypes.memmove(ctypes.addressof(handle._obj), packed, len(packed))
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        if flags.value != cuda_driver.LAZY_ENABLE_PEER_ACCESS:
            return INVALID_VALUE
        pid, descriptor, num_bytes = struct.unpack_from("<QQQ", bytes(handle))
        if pid == os.getpid():
            return INVALID_CONTEXT
        try:
            memory = map_other(pid, descriptor, num_bytes)
        except Unmapped:
            return INVALID_HANDLE
        _mappings(memory)[0] += 1
        address._obj.value = self._map(memory)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        if address.value in self._own or address.value not in self._mapped:
            return INVALID_VALUE
        _mappings(self._mapped.pop(address.value))[0] -= 1
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = ERRORS[status]
        return 0


def _mappings(memory: mmap.mmap) -> np.ndarray[Any, Any]:
    return np.frombuffer(memory, np.int64, count=1, offset=len(memory) - MAPPINGS_BYTES)


DRIVER = Driver()
