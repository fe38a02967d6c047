"""Memory of GPUs that the ranks of one host map, by CUDA's handles for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runahead.ranks.mapped import cuda_driver
from runahead.ranks.mapped.memory import Arena, MappedMemory, MappedSegment


class DeviceMemory(MappedMemory):
    """Arenas on this rank's GPU. An opened arena is an address.

    Raises:
        Unmapped: streams cannot wait for the cells, or other ranks cannot map this GPU's memory.
    """

    def __init__(
        self, rank: int, segments: dict[int, MappedSegment], pids: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(rank, segments, pids)
        self._device = device
        self._retired: list[Arena] = []
        address, _ = cuda_driver.allocate(1)  # tried now, so that all ranks learn of a refusal before the first prompt
        cuda_driver.free(address)
        for segment in segments.values():
            cuda_driver.register(segment.address, MappedSegment.num_bytes(len(pids)))

    def _make(self, num_bytes: int) -> tuple[int, bytes]:
        self._free_retired()
        try:
            return cuda_driver.allocate(num_bytes)
        except RuntimeError:
            torch.cuda.empty_cache()  # torch keeps what earlier prompts freed
            return cuda_driver.allocate(num_bytes)

    def _retire(self, arena: Arena) -> None:
        self._retired.append(arena)

    def _free_retired(self) -> None:
        """Free arenas that no peer can have mapped any more: their owner must not do so before."""
        for arena in list(self._retired):
            dropped = [self.own.cell("dropped", peer).value for peer in self.received if peer in self.peers]
            if all(oldest > arena.number for oldest in dropped):
                self._retired.remove(arena)
                cuda_driver.free(arena.owner)

    def _tensor(self, arena: Arena) -> tuple[Tensor, Any]:
        exporter = _OnDevice(arena.owner, arena.num_bytes)
        return torch.as_tensor(exporter, device=self._device), exporter

    def _base(self, arena: Arena) -> int:
        return int(arena.owner)

    def _open(self, pid: int, handle: bytes, num_bytes: int) -> int:
        return cuda_driver.open_handle(handle)

    def _close(self, opened: int) -> None:
        cuda_driver.close_handle(opened)


class _OnDevice:
    """Device memory as torch takes it over without a copy; torch refers to this object as long as it uses it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
