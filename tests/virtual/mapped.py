"""Mapped memory of virtual GPUs: every access to it goes through the virtual machine."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runahead.ranks.mapped.memory import Arena, Cell, MappedMemory, MappedSegment
from tests.virtual.machine import Operation

if TYPE_CHECKING:
    from tests.virtual.device import Job


class VirtualCell(Cell):
    """A cell as one rank's host sees it; `address` names it."""

    def __init__(self, cell: Cell, job: Job, rank: int) -> None:
        self.address, self._job, self._rank = cell.address, job, rank

    @property
    def value(self) -> int:
        return self._job.machine.values.get(self.address, 0)

    def set(self, number: int) -> None:
        assert number > self.value, "counters do not go back"
        self._job.host_does(Operation(rank=self._rank, stream=-1, kind="write value", cell=self.address, value=number))


class VirtualSegment(MappedSegment):
    """One rank's view of a segment."""

    def __init__(self, memory: mmap.mmap, job: Job, rank: int) -> None:
        super().__init__(memory, job.size)
        self._job, self._rank = job, rank
        self.attended = VirtualCell(self.attended, job, rank)

    def cell(self, name: str, peer: int) -> Cell:
        cell = super().cell(name, peer)
        return cell if name == "dropped" else VirtualCell(cell, self._job, self._rank)


class VirtualMemory(MappedMemory):
    """Arenas are tensors of this process, and their handles numbers."""

    def __init__(self, job: Job, rank: int, hosts: Sequence[int]) -> None:
        beside = [peer for peer in range(job.size) if hosts[peer] == hosts[rank]]
        segments: dict[int, MappedSegment] = {peer: VirtualSegment(job.segments[peer], job, rank) for peer in beside}
        super().__init__(rank, segments, list(range(job.size)))
        self._job = job

    def _make(self, num_bytes: int) -> tuple[Tensor, bytes]:
        self._job.arenas.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._job.arenas[-1], len(self._job.arenas).to_bytes(8, "little")

    def _retire(self, arena: Arena) -> None:
        pass

    def _tensor(self, arena: Arena) -> tuple[Tensor, Any]:
        whole = arena.owner[:]
        return whole, whole

    def _base(self, arena: Arena) -> int:
        return int(arena.owner.data_ptr())

    def _open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        return self._job.arenas[int.from_bytes(handle[:8], "little") - 1]

    def _close(self, opened: Tensor) -> None:
        """Close as a driver may, which unmaps memory once the device has done all that is queued. Raises: Unwatched."""
        self._job.gpus[self.rank].synchronize()
