"""Memory that ranks of one host map: cells for counters, and slabs into which other ranks copy keys and values.

Every rank has a segment of host memory with its cells, and an arena with its slabs. Both have no names: on Linux a
process opens another one's memory through /proc/<pid>/fd, so nothing is left over whichever way a process ends, and
the size of /dev/shm does not matter. An arena is kept for the next prompts, and made anew only if a prompt needs more.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LINE = 64
"""Bytes between two cells, so that ranks do not write to the same cache line."""

ALIGNMENT = 512
"""Bytes to which slabs are aligned in an arena."""

HANDLE_BYTES = 64
"""Room for what another rank needs to open an arena: a file descriptor, or CUDA's handle."""

MAX_LAYERS = 10_000

FAR = 1 << 30
"""More than any counter is ahead of another."""

MADV_POPULATE_WRITE = 23
"""Parameter of madvise(2), from Linux 5.14 on, that Python does not name."""

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
POLL_S = 1e-4


class Unmapped(RuntimeError):
    """Memory cannot be shared or mapped; the message says why."""


def _futex() -> Any:
    """syscall(2) for futexes; None where they are not known."""
    return getattr(ctypes.CDLL(None, use_errno=True), "syscall", None) if platform.machine() in FUTEX_CALLS else None


_SYSCALL = _futex()
_FUTEX = FUTEX_CALLS.get(platform.machine(), 0)
_FENCE = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def fence() -> None:
    """Order the memory accesses before against those after, for processors that may swap them, such as Arm's."""
    for _ in range(2):  # accesses before a release stay before it, those after an acquisition stay after it
        with _FENCE:
            pass


class Cell:
    """A counter of 32 bits in shared memory that one rank at a time increases. It may wrap around.

    Attributes:
        address: where it is in this process.
    """

    def __init__(self, words: np.ndarray[Any, Any], index: int) -> None:
        self._words, self._index = words, index
        self.address = words.ctypes.data + 4 * index

    @property
    def value(self) -> int:
        return int(self._words[self._index])

    def reached(self, number: int) -> bool:
        """Whether the counter is at `number` or beyond. What its writer wrote before may be read then."""
        if (self.value - number) & 0xFFFFFFFF >= 1 << 31:
            return False
        fence()
        return True

    def set(self, number: int) -> None:
        """Set the counter, after all that this thread has written, and wake those that wait for it."""
        fence()
        self._words[self._index] = number & 0xFFFFFFFF
        if _SYSCALL is not None:
            _SYSCALL(_FUTEX, ctypes.c_void_p(self.address), FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, number: int, block_s: float, *, by_host: bool = True) -> bool:
        """Wait for `block_s` seconds at most until the counter is at `number`, and return whether it is.

        Args:
            by_host: only hosts write it, with `set`. A GPU wakes nobody, so its counters are looked at now and then.
        """
        deadline = time.perf_counter() + block_s
        while not self.reached(number):
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                return False
            if not by_host or _SYSCALL is None:
                time.sleep(min(POLL_S, left_s))
                continue
            seen = self.value
            if (seen - number) & 0xFFFFFFFF >= 1 << 31:
                limit = _Timespec(int(left_s), int(left_s % 1 * 1e9))
                _SYSCALL(_FUTEX, ctypes.c_void_p(self.address), FUTEX_WAIT, seen, ctypes.byref(limit), None, 0)
        return True


class SharedBytes:
    """Host memory without a name that other processes of this host can map.

    Raises:
        Unmapped: it cannot be made.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create("runahead", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, num_bytes)
            self.memory = mmap.mmap(self.descriptor, num_bytes)
        except (AttributeError, OSError) as error:  # AttributeError: not Linux
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            raise Unmapped(f"{num_bytes:,} bytes of shared memory cannot be had ({error})") from error

    def touch(self) -> None:
        """Have the pages now, near this thread, rather than when another rank writes to them first.

        Raises:
            Unmapped: there is not as much memory.
        """
        try:
            self.memory.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel
                raise Unmapped(f"{self.num_bytes:,} bytes of shared memory cannot be had ({error})") from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)


def map_other(pid: int, descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map `SharedBytes` of another process of this host.

    Raises:
        Unmapped: the other process, or its memory, cannot be opened.
    """
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unmapped(f"the memory of process {pid} cannot be opened ({error})") from error
    try:
        return mmap.mmap(opened, num_bytes)
    except OSError as error:
        raise Unmapped(f"the memory of process {pid} cannot be mapped ({error})") from error
    finally:
        os.close(opened)


PER_PEER = ("arrived", "credit", "begun", "left", "dropped")


class MappedSegment:
    """A rank's cells, and where its slabs are.

    Cells of a rank, per peer: `arrived`, messages of the peer that are in this rank's slabs (written by the peer);
    `credit`, layers whose slabs the peer may write; `begun`, prefills for which the layers are described; `left`,
    messages to the peer that have left, where the peer's own segment does not tell; `dropped`, the oldest arena that
    the peer may still have mapped (written by the peer). And `attended`, steps that this rank's GPU has done.

    Args:
        memory: the bytes, all zero at first.
        size: number of ranks.

    Attributes:
        address: of the bytes in this process.
    """

    def __init__(self, memory: Any, size: int) -> None:
        self._memory = memory
        words = np.frombuffer(memory, np.uint32, count=self._num_cells(size) * LINE // 4)
        self.attended, self.address = Cell(words, 0), int(words.ctypes.data)
        step = LINE // 4
        self._cells = [
            {name: Cell(words, step * (1 + peer * len(PER_PEER) + at)) for at, name in enumerate(PER_PEER)}
            for peer in range(size)
        ]
        after = self._num_cells(size) * LINE
        self._arena = np.frombuffer(memory, np.int64, count=3, offset=after)
        self._handle = np.frombuffer(memory, np.uint8, count=HANDLE_BYTES, offset=after + LINE)
        self._layers = np.frombuffer(memory, np.int64, count=MAX_LAYERS, offset=after + LINE + HANDLE_BYTES)

    @staticmethod
    def _num_cells(size: int) -> int:
        return 1 + size * len(PER_PEER)

    @classmethod
    def num_bytes(cls, size: int) -> int:
        used = cls._num_cells(size) * LINE + LINE + HANDLE_BYTES + 8 * MAX_LAYERS
        return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE

    def cell(self, name: str, peer: int) -> Cell:
        return self._cells[peer][name]

    def describe(self, number: int, oldest: int, num_bytes: int, handle: bytes, layers: Sequence[int]) -> None:
        """Write which arena the slabs are in, and where in it each layer's token 0 is or would be, in bytes."""
        self._arena[:] = number, oldest, num_bytes
        self._handle[:] = np.frombuffer(handle.ljust(HANDLE_BYTES, b"\0"), np.uint8)
        self._layers[: len(layers)] = layers

    @property
    def arena(self) -> tuple[int, int, int]:
        """Number of the arena, of the oldest that is in use, and its size in bytes."""
        number, oldest, num_bytes = self._arena.tolist()
        return number, oldest, num_bytes

    @property
    def handle(self) -> bytes:
        return self._handle.tobytes()

    def layer(self, layer: int) -> int:
        return int(self._layers[layer])


@dataclass(kw_only=True)
class Arena:
    """Memory for the slabs of one prompt at a time.

    Attributes:
        owner: whatever owns the memory.
        handle: what another rank needs to open it.
        lease: refers to what is alive as long as a tensor in it is.
    """

    number: int
    num_bytes: int
    owner: Any
    handle: bytes
    lease: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None


@dataclass
class Counts:
    """Numbers of messages, layers and prefills over a link so far."""

    messages: int = 0
    layers: int = 0
    prefills: int = 0


class MappedMemory(ABC):
    """This rank's segment and arenas, and what it has mapped of other ranks'.

    Args:
        segments: of this rank and of those whose memory it can map.
        pids: process id of every rank.

    Attributes:
        sent, received: counts per peer.
    """

    def __init__(self, rank: int, segments: dict[int, MappedSegment], pids: Sequence[int]) -> None:
        self.rank, self.own, self._segments, self._pids = rank, segments[rank], segments, pids
        self.peers = segments.keys() - {rank}
        self.sent: dict[int, Counts] = {}
        self.received: dict[int, Counts] = {}
        self.attended = 0
        self._arenas: list[Arena] = []
        self._current: Arena | None = None
        self._numbers = 0
        self._opened: dict[int, dict[int, Any]] = {}

    def segment(self, peer: int) -> MappedSegment:
        return self._segments[peer]

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Byte tensors of these sizes, into which peers can copy after `describe`.

        Raises:
            Unmapped: there is not as much memory.
        """
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        arena = self._arena(max(end, ALIGNMENT))
        whole, exporter = self._tensor(arena)
        arena.lease, self._current = weakref.ref(exporter), arena
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def describe(self, layers: Sequence[Tensor], row_bytes: Sequence[int], first: Sequence[int]) -> None:
        """Tell the peers where the layers of the next prefill are: their slabs, bytes per token and first tokens."""
        assert self._current is not None
        base = self._base(self._current)
        offsets = [
            layer.data_ptr() - base - start * row for layer, start, row in zip(layers, first, row_bytes, strict=True)
        ]
        arena, oldest = self._current, min(each.number for each in self._arenas)
        self.own.describe(arena.number, oldest, arena.num_bytes, arena.handle, offsets)

    def opened(self, peer: int) -> Any:
        """The arena that a peer has described, mapped into this process. Earlier ones stay so until `drop_old`.

        Raises:
            Unmapped: it cannot be mapped.
        """
        segment, opened = self.segment(peer), self._opened.setdefault(peer, {})
        number, _, num_bytes = segment.arena
        if number not in opened:
            opened[number] = self._open(self._pids[peer], segment.handle, num_bytes)
        return opened[number]

    def drop_old(self, peer: int) -> None:
        """Unmap arenas that a peer has given up, and tell it.

        Called when all of this rank's copies are made and nothing that is queued waits for a peer: a device may do all
        of that before it unmaps anything, in a call that nobody watches.
        """
        segment, opened = self.segment(peer), self._opened.get(peer, {})
        _, oldest, _ = segment.arena
        for old in [each for each in opened if each < oldest]:
            self._close(opened.pop(old))
        segment.cell("dropped", self.rank).set(oldest)

    def release(self) -> None:
        """Let everything that waits on this rank's behalf go on, since the job is over."""
        for peer in range(len(self._pids)):
            for name in ("arrived", "left", "credit"):
                cell = self.own.cell(name, peer)
                cell.set(cell.value + FAR)
        for peer in self.peers:
            cell = self.segment(peer).cell("credit", self.rank)
            cell.set(cell.value + FAR)

    def _arena(self, num_bytes: int) -> Arena:
        """A free arena with room for so many bytes. Free ones that are too small are given back."""
        fitting = [each for each in self._arenas if each.is_free and each.num_bytes >= num_bytes]
        if fitting:
            return fitting[-1]
        for arena in [each for each in self._arenas if each.is_free]:
            self._arenas.remove(arena)
            self._retire(arena)
        self._numbers += 1
        owner, handle = self._make(num_bytes)
        made = Arena(number=self._numbers, num_bytes=num_bytes, owner=owner, handle=handle)
        self._arenas.append(made)
        return made

    @abstractmethod
    def _make(self, num_bytes: int) -> tuple[Any, bytes]:
        """New memory: (owner, handle)."""

    @abstractmethod
    def _retire(self, arena: Arena) -> None:
        """Free an arena, perhaps once no peer has it mapped."""

    @abstractmethod
    def _tensor(self, arena: Arena) -> tuple[Tensor, Any]:
        """All of an arena as bytes, and an object that lives as long as the tensor's memory is used."""

    @abstractmethod
    def _base(self, arena: Arena) -> int:
        """Address of an arena."""

    @abstractmethod
    def _open(self, pid: int, handle: bytes, num_bytes: int) -> Any: ...

    @abstractmethod
    def _close(self, opened: Any) -> None: ...


class HostMemory(MappedMemory):
    """Arenas in host memory. An opened arena is a byte tensor."""

    def _make(self, num_bytes: int) -> tuple[SharedBytes, bytes]:
        made = SharedBytes(num_bytes)
        made.touch()
        return made, made.descriptor.to_bytes(8, "little")

    def _retire(self, arena: Arena) -> None:
        arena.owner = None  # the pages go with the last mapping

    def _tensor(self, arena: Arena) -> tuple[Tensor, Any]:
        exporter = np.frombuffer(arena.owner.memory, np.uint8)
        return torch.from_numpy(exporter), exporter

    def _base(self, arena: Arena) -> int:
        return int(np.frombuffer(arena.owner.memory, np.uint8).ctypes.data)

    def _open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        return torch.from_numpy(
            np.frombuffer(map_other(pid, int.from_bytes(handle[:8], "little"), num_bytes), np.uint8)
        )

    def _close(self, opened: Tensor) -> None:
        pass  # unmapped with the tensor
