"""Memory of a GPU that other processes map: what the driver refuses is said and given back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runahead.ranks.mapped import cuda_driver
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.mapped.memory import Segment, Unmapped

NOT_SUPPORTED = 801
TEXT = "operation not supported"


class Driver:
    """The functions of libcuda that map memory.

    Args:
        refused: a function that fails.
    """

    def __init__(self, refused: str | None = None) -> None:
        self.refused, self.allocated, self.locked = refused, list[int](), list[int]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        does: dict[str, Callable[..., object]] = {
            "cuGetErrorString": lambda status, text: setattr(text._obj, "value", TEXT.encode()),
            "cuMemAlloc_v2": self._allocate,
            "cuMemFree_v2": lambda address: self.allocated.remove(address.value),
            "cuMemHostRegister_v2": lambda address, *_: self.locked.append(address.value),
            "cuMemHostUnregister": lambda address: self.locked.remove(address.value),
            "cuMemHostGetDevicePointer_v2": lambda on_device, address, _: setattr(on_device._obj, "value", 1 << 40),
            "cuIpcGetMemHandle": lambda handle, address: None,
        }
        if name not in does:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.refused:
                return NOT_SUPPORTED
            does[name](*arguments)
            return 0

        return call

    def _allocate(self, address: Any, num_bytes: ctypes.c_size_t) -> None:
        address._obj.value = 4096 * (1 + len(self.allocated))
        self.allocated.append(address._obj.value)


def memory_with(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_registered", [])
    segments = {rank: Segment(mmap.mmap(-1, Segment.num_bytes(2)), 2) for rank in range(2)}
    return DeviceMemory(0, segments, [1, 2], torch.device("cuda", 0))


def test_memory_that_can_be_exported_is_not_held_before_a_prompt_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    memory_with(driver, monkeypatch)
    assert (driver.allocated, len(driver.locked)) == ([], 2)


def test_memory_that_cannot_be_exported_is_freed_and_the_gpu_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refused="cuIpcGetMemHandle")
    with pytest.raises(Unmapped, match=rf"this GPU's memory cannot be exported.*MIG.*cuIpcGetMemHandle: {TEXT}"):
        memory_with(driver, monkeypatch)
    assert (driver.allocated, driver.locked) == ([], [])


def test_host_memory_that_the_gpu_cannot_address_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refused="cuMemHostGetDevicePointer_v2")
    with pytest.raises(Unmapped, match=rf"cuMemHostGetDevicePointer_v2: {TEXT}"):
        memory_with(driver, monkeypatch)
    assert driver.locked == []
