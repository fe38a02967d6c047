"""The virtual GPU's driver: what it refuses, and the order of a stream that waits for a counter."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from runahead.ranks.mapped import cuda_driver
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.mapped.memory import Cell, MappedSegment, Unmapped
from tests.virtual.cuda.driver import DEFAULT_STREAM, NOT_SUPPORTED, Driver, Happening
from tests.virtual.cuda.memory import HOST
from tests.waiting import until

STREAM = 7


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: made)
    monkeypatch.setattr(cuda_driver, "_registered", [])
    monkeypatch.setattr(HOST, "_registered", {})
    cuda_driver._device_address.cache_clear()
    yield made
    for queue in made._queues.values():
        queue.close()
    cuda_driver._device_address.cache_clear()


@pytest.fixture
def cells(driver: Driver) -> tuple[Cell, Cell]:
    """Two counters in page-locked memory."""
    num_bytes = MappedSegment.num_bytes(2)
    segment = MappedSegment(mmap.mmap(-1, num_bytes), 2)
    cuda_driver.register(segment.address, num_bytes)
    return segment.cell("credit", 1), segment.cell("arrived", 1)


def at(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def test_a_stream_copies_and_counts_after_its_counter(cells: tuple[Cell, Cell]) -> None:
    credit, arrived = cells
    address, _ = cuda_driver.allocate(16)
    source = torch.arange(16, dtype=torch.uint8)
    cuda_driver.stream_wait_value(STREAM, credit.address, 3)
    cuda_driver.copy(STREAM, address, source.data_ptr(), 16)
    cuda_driver.stream_write_value(STREAM, arrived.address, 1)
    credit.set(2)
    assert not arrived.wait(1, 0.1) and at(address, 16).eq(0xFF).all()
    credit.set(3)
    cuda_driver.stream_wait_value(DEFAULT_STREAM, arrived.address, 1)
    assert at(address, 16).equal(source)


def test_what_a_stream_is_told_behind_a_wait_keeps_its_order(driver: Driver, cells: tuple[Cell, Cell]) -> None:
    credit, _ = cells
    began, done, other = Happening(), Happening(), Happening()
    cuda_driver.stream_wait_value(STREAM, credit.address, 1)
    driver.queue(STREAM, began.set)
    driver.queue(STREAM + 1, done.set, [(began, 0)])  # another stream, which waits for an event of this one
    driver.queue(STREAM + 2, other.set)
    assert other.reached(0) and not began.reached(0) and not done.reached(0)
    credit.set(1)
    until(lambda: done.reached(0))
    assert began.reached(0)


def test_what_cuda_refuses_is_refused(cells: tuple[Cell, Cell]) -> None:
    address, handle = cuda_driver.allocate(64)
    source = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(Unmapped, match="cuMemcpyAsync: invalid argument"):
        cuda_driver.copy(STREAM, address + 8, source.data_ptr(), 64)
    with pytest.raises(Unmapped, match="cuIpcOpenMemHandle_v2: invalid device context"):
        cuda_driver.open_handle(handle)
    with pytest.raises(Unmapped, match="cuMemFree_v2: invalid argument"):
        cuda_driver.free(address + 8)
    cuda_driver.free(address)
    with pytest.raises(Unmapped, match="cuMemFree_v2: invalid argument"):
        cuda_driver.free(address)
    with pytest.raises(Unmapped, match="cuIpcCloseMemHandle: invalid argument"):
        cuda_driver.close_handle(address)
    with pytest.raises(ValueError, match="not in page-locked memory"):
        cuda_driver.stream_wait_value(STREAM, source.data_ptr(), 1)


def test_a_copy_to_memory_that_was_unmapped_meanwhile_is_an_error(cells: tuple[Cell, Cell]) -> None:
    credit, arrived = cells
    address, _ = cuda_driver.allocate(16)
    source = torch.zeros(16, dtype=torch.uint8)
    cuda_driver.stream_wait_value(STREAM, credit.address, 1)
    cuda_driver.copy(STREAM, address, source.data_ptr(), 16)
    cuda_driver.free(address)
    credit.set(1)

    def has_failed() -> bool:
        try:
            cuda_driver.stream_write_value(STREAM, arrived.address, 1)
        except Unmapped as error:
            assert "unspecified launch failure" in str(error)
            return True
        return False

    until(has_failed)
    assert not arrived.reached(1)


class TestMemoryOfARank:
    """A refusal of the driver is told, and what was taken is given back."""

    @pytest.fixture
    def segments(self) -> dict[int, MappedSegment]:
        return {rank: MappedSegment(mmap.mmap(-1, MappedSegment.num_bytes(2)), 2) for rank in range(2)}

    def test_none_is_held_before_a_prompt_needs_it(self, driver: Driver, segments: dict[int, MappedSegment]) -> None:
        DeviceMemory(0, segments, [1, 2], torch.device("cpu"))
        assert not driver._own and all(HOST.covers(each.address) for each in segments.values())

    def test_what_cannot_be_exported_is_freed(
        self, driver: Driver, segments: dict[int, MappedSegment], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver, "cuIpcGetMemHandle", lambda *_: NOT_SUPPORTED)
        said = "this GPU's memory cannot be exported.*MIG.*cuIpcGetMemHandle: operation not supported"
        with pytest.raises(Unmapped, match=said):
            DeviceMemory(0, segments, [1, 2], torch.device("cpu"))
        assert not driver._own and not HOST._registered

    def test_host_memory_that_the_gpu_cannot_address_is_unlocked(
        self, driver: Driver, segments: dict[int, MappedSegment], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver, "cuMemHostGetDevicePointer_v2", lambda *_: NOT_SUPPORTED)
        with pytest.raises(Unmapped, match="cuMemHostGetDevicePointer_v2: operation not supported"):
            DeviceMemory(0, segments, [1, 2], torch.device("cpu"))
        assert not HOST._registered
