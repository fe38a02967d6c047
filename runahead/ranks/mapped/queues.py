"""Queues of copies between ranks of one host: on a GPU streams, on a CPU tasks that a thread runs in order.

A task waits until cells have reached numbers, moves keys and values, and sets cells; the host does not wait for it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from runahead.ranks.accelerator import Accelerator, Communicator, Stream
from runahead.ranks.mapped.memory import Cell, HostMemory, MappedMemory

At: TypeAlias = tuple[Cell, int]
"""A cell, and a number that it reaches."""

Place: TypeAlias = Callable[[], tuple[Any, int]]
"""Returns an opened arena, and the bytes from its begin."""

Logged: TypeAlias = Callable[[object, object], None]
"""Called with the marks of the clock around a message that is sent."""

LOOK_S = 0.05
"""Seconds between two looks at whether a queue was closed."""

CLOSE_S = 1.0
"""Most seconds that closing a queue waits for its thread, which may be blocked by a rank on another host."""


class CopyQueue(ABC):
    """Tasks that run one after the other, while this rank computes.

    A task starts after all that this rank has computed, or queued for its device, when it is submitted, and once the
    cells of `waits` have reached their numbers. At its end those of `then` are set.
    """

    @abstractmethod
    def copy(self, source: Tensor, place: Place, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        """Copy a contiguous tensor to a place, which is asked for after the waits, or at once on a GPU."""

    @abstractmethod
    def send(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        """Send to a rank on another host, over the backend."""

    @abstractmethod
    def receive(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At) -> None:
        """Receive from a rank on another host, over the backend."""

    @abstractmethod
    def set(self, waits: Sequence[At], then: Sequence[At]) -> None:
        """Wait, then set cells."""


class Copying(ABC):
    """Means of one rank to copy keys and values: mapped memory, queues, and waits of its compute.

    Attributes:
        memory: what this rank and its peers have mapped.
        is_asynchronous: what is computed is queued for a device, which the host runs ahead of.
    """

    memory: MappedMemory
    is_asynchronous = False

    @abstractmethod
    def queue(self, name: str) -> CopyQueue:
        """The queue of this name, made on first use and kept."""

    @abstractmethod
    def computes_after(self, waits: Sequence[At]) -> bool:
        """Let all that is computed from now on wait for cells. False: the device cannot, so the host has to."""

    @abstractmethod
    def after_compute(self, cell: Cell, number: int) -> None:
        """Set a cell after all that is computed or queued so far."""

    @abstractmethod
    def wait(self, cell: Cell, number: int, block_s: float) -> bool:
        """Let the host wait for a cell, for `block_s` seconds at most; return whether it has reached its number."""

    @property
    def error(self) -> Exception | None:
        """The exception of a task that failed; None if none did."""
        return None

    def connect(self, links: Mapping[tuple[int, int], Communicator]) -> None:  # noqa: B027
        """Take communicators of directed links (from rank, to rank) to other hosts, over which NCCL sends."""

    @abstractmethod
    def close(self) -> None:
        """End all tasks, whatever they wait for."""


class HostCopying(Copying):
    """Copies between processes by the processor. A host that computes is a device that does what it is told at once."""

    def __init__(self, memory: HostMemory, group: dist.ProcessGroup) -> None:
        self.memory, self._group = memory, group
        self._queues: dict[str, HostQueue] = {}

    def queue(self, name: str) -> CopyQueue:
        if name not in self._queues:
            self._queues[name] = HostQueue(name, self._group)
        return self._queues[name]

    def computes_after(self, waits: Sequence[At]) -> bool:
        return all(cell.reached(number) for cell, number in waits)

    def after_compute(self, cell: Cell, number: int) -> None:
        cell.set(number)

    def wait(self, cell: Cell, number: int, block_s: float) -> bool:
        return cell.wait(number, block_s)

    @property
    def error(self) -> Exception | None:
        return next((queue.error for queue in self._queues.values() if queue.error is not None), None)

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


class HostQueue(CopyQueue):
    """A queue on a CPU. A copy that can be made at once is made in the caller; all else is up to a thread.

    Args:
        name: of the thread.
        group: carries what is sent to other hosts.

    Attributes:
        error: why the thread has ended, if it failed.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group
        self._tasks: deque[tuple[Sequence[At], Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.error: Exception | None = None

    def copy(self, source: Tensor, place: Place, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        def move() -> None:
            arena, offset = place()
            arena[offset : offset + source.nbytes].view(source.dtype).view(source.shape).copy_(source)

        self._submit(waits, move, [then], logged)

    def send(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        self._submit(waits, lambda: dist.send(part, peer, self._group, tag), [then], logged, may_block=True)

    def receive(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At) -> None:
        self._submit(waits, lambda: dist.recv(part, peer, self._group, tag), [then], may_block=True)

    def set(self, waits: Sequence[At], then: Sequence[At]) -> None:
        self._submit(waits, lambda: None, then)

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        if self._thread is not None:  # a thread that runs when the interpreter ends may abort the process
            self._thread.join(CLOSE_S)

    def _submit(
        self,
        waits: Sequence[At],
        move: Callable[[], object],
        then: Sequence[At],
        logged: Logged | None = None,
        *,
        may_block: bool = False,
    ) -> None:
        def run() -> None:
            begin_s = time.perf_counter()
            move()
            if logged is not None:
                logged(begin_s, time.perf_counter())
            for cell, number in then:
                cell.set(number)

        with self._changed:
            if not may_block and not self._tasks and all(cell.reached(number) for cell, number in waits):
                run()
                return
            self._tasks.append((waits, run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._closed.is_set():
                    self._changed.wait()
                if self._closed.is_set():
                    return
                waits, run = self._tasks[0]
            for cell, number in waits:
                while not cell.wait(number, LOOK_S):
                    if self._closed.is_set():
                        return
            try:
                with torch.inference_mode():  # as in the thread that computes; the mode is a thread's own
                    run()
            except Exception as error:
                self.error = error
                return
            with self._changed:  # not before: a copy that the caller makes must not overtake this one
                self._tasks.popleft()


class DeviceCopying(Copying):
    """Copies by a GPU's copy engines, on a stream per queue. Streams wait for cells, and no multiprocessor does."""

    is_asynchronous = True

    def __init__(self, accelerator: Accelerator, memory: MappedMemory) -> None:
        self.memory, self._gpu = memory, accelerator
        self._links: dict[tuple[int, int], Communicator] = {}

    def queue(self, name: str) -> CopyQueue:
        return DeviceQueue(self._gpu, self._gpu.stream(name), self.memory.rank, self._links)

    def connect(self, links: Mapping[tuple[int, int], Communicator]) -> None:
        self._links.update(links)

    def computes_after(self, waits: Sequence[At]) -> bool:
        for cell, number in waits:
            self._gpu.wait_value(cell, number)
        return True

    def after_compute(self, cell: Cell, number: int) -> None:
        self._gpu.write_value(cell, number)

    def wait(self, cell: Cell, number: int, block_s: float) -> bool:
        return self._gpu.host_waits(cell, number, block_s)

    def close(self) -> None:
        """Let all streams run on: one that waits for a rank that is gone would keep this process from ending."""
        self.memory.release()


class DeviceQueue(CopyQueue):
    """A queue on a stream of a GPU."""

    def __init__(
        self, accelerator: Accelerator, stream: Stream, rank: int, links: Mapping[tuple[int, int], Communicator]
    ) -> None:
        self._gpu, self._stream, self._rank, self._links = accelerator, stream, rank, links

    def copy(self, source: Tensor, place: Place, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        self._queue(waits, lambda: self._gpu.copy_into(*place(), source), [then], logged)

    def send(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At, logged: Logged | None) -> None:
        self._queue(waits, lambda: self._links[self._rank, peer].isend(part, peer).wait(), [then], logged)

    def receive(self, part: Tensor, peer: int, tag: int, waits: Sequence[At], then: At) -> None:
        self._queue(waits, lambda: self._links[peer, self._rank].irecv(part, peer).wait(), [then], None)

    def set(self, waits: Sequence[At], then: Sequence[At]) -> None:
        self._queue(waits, lambda: None, then, None)

    def _queue(
        self, waits: Sequence[At], move: Callable[[], object], then: Sequence[At], logged: Logged | None
    ) -> None:
        self._stream.wait_stream(self._gpu.current_stream())
        with self._gpu.on(self._stream):
            for cell, number in waits:
                self._gpu.wait_value(cell, number)
            begin = self._gpu.mark(timed=True) if logged is not None else None
            move()
            if logged is not None:
                logged(begin, self._gpu.mark(timed=True))
            for cell, number in then:
                self._gpu.write_value(cell, number)
