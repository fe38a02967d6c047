"""A machine of virtual GPUs: what each host has issued, and what has run on each stream.

Hosts issue operations to streams. Those of a stream run one after the other, and streams run in any order. Operations:
- a kernel, at once, on any free multiprocessor;
- the record of an event, and the wait of a stream for an event;
- the write of a value to a cell, and the wait of a stream for a value;
- a copy into another rank's memory, by a copy engine: no multiprocessor;
- a transfer: messages to and from peers. Once started it occupies multiprocessors until all its peers have started
  theirs, as NCCL's kernels do. The n-th send of a communicator from one rank to another meets the n-th receipt there.

A program is what one host issued, with the waits of the host itself, so that it can be run again in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Resources of a GPU. Stream s uses hardware queue s % `queues`; operations leave a queue in the order of issue."""

    multiprocessors: int = 132
    queues: int = 32


@dataclass(frozen=True)
class Half:
    """This rank's end of a message: the `number`-th of a communicator from one rank to another."""

    communicator: int
    sender: int
    receiver: int
    number: int
    is_send: bool
    part: Any = field(compare=False)

    @property
    def other(self) -> Half:
        return Half(self.communicator, self.sender, self.receiver, self.number, not self.is_send, None)


@dataclass(eq=False, kw_only=True)
class Operation:
    """An operation of a stream, or of the host itself (stream -1): the wait for an event.

    Attributes:
        kind: "kernel", "record", "wait", "write value", "wait value", "copy" or "transfer".
        event: number of the event that is recorded or waited for.
        cell, value: what is written, or has to be reached.
        run: what a kernel computes or a copy copies.
        after: called once it has run, with data or without.
        ctas: multiprocessors that a transfer occupies.
    """

    rank: int
    stream: int
    kind: str
    event: int = -1
    cell: int = 0
    value: int = 0
    run: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    halves: tuple[Half, ...] = ()
    ctas: int = 0

    def __str__(self) -> str:
        ends = [f"{half.sender}->{half.receiver} #{half.number}" for half in self.halves]
        return f"rank {self.rank}, stream {self.stream}: {self.kind} {' '.join(ends)}".rstrip()


class Machine:
    """State of all GPUs of a job.

    Args:
        programs: of every rank; they may grow while the machine runs.

    Attributes:
        has_data: move the bytes of messages and run kernels, rather than only the order of operations.
    """

    def __init__(self, programs: list[list[Operation]], budget: Budget, *, has_data: bool = False) -> None:
        self.programs, self.budget, self.has_data = programs, budget, has_data
        self.issued = [0] * len(programs)
        self.streams: dict[tuple[int, int], list[Operation]] = {}
        self.queues: dict[tuple[int, int], list[Operation]] = {}
        self.happened: set[int] = set()
        self.values: dict[int, int] = {}
        self.started: set[Half] = set()
        self.running: list[Operation] = []
        self._parts: dict[Half, Any] = {}

    def copy(self) -> Machine:
        """The same state, to go on from in another way."""
        other = Machine(self.programs, self.budget)
        other.issued = list(self.issued)
        other.streams = {key: list(operations) for key, operations in self.streams.items()}
        other.queues = {key: list(operations) for key, operations in self.queues.items()}
        other.happened, other.started, other.running = set(self.happened), set(self.started), list(self.running)
        other.values = dict(self.values)
        return other

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that differs between two states of the same programs."""
        left = tuple(len(operations) for operations in self.streams.values())
        return tuple(self.issued), left, frozenset(self.started), frozenset(map(id, self.running))

    @property
    def is_finished(self) -> bool:
        hosts = all(issued == len(program) for issued, program in zip(self.issued, self.programs, strict=True))
        return hosts and not any(self.streams.values())

    def issue(self, rank: int) -> bool:
        """Let a host issue its next operation, unless it waits for an event that has not happened."""
        if self.issued[rank] == len(self.programs[rank]):
            return False
        operation = self.programs[rank][self.issued[rank]]
        if operation.stream < 0 and operation.kind == "write value":
            self.values[operation.cell] = operation.value
        elif operation.stream < 0 and not self.has_come(operation):
            return False
        self.issued[rank] += 1
        if operation.stream >= 0:
            self.streams.setdefault((rank, operation.stream), []).append(operation)
            self.queues.setdefault((rank, operation.stream % self.budget.queues), []).append(operation)
        return True

    def has_come(self, wait: Operation) -> bool:
        """Whether what an operation waits for has happened."""
        if wait.kind == "wait value":
            return self.values.get(wait.cell, 0) >= wait.value
        return wait.event in self.happened

    def free(self, rank: int) -> int:
        """Multiprocessors of a rank that no transfer occupies."""
        return self.budget.multiprocessors - sum(each.ctas for each in self.running if each.rank == rank)

    def ready(self) -> Iterator[Operation]:
        """The operations that could run or start next, and transfers that could end."""
        for operations in self.streams.values():
            if operations and self.can_run(operations[0]):
                yield operations[0]

    def can_run(self, operation: Operation) -> bool:
        """Whether the first operation of a stream can run, start or end."""
        if operation in self.running:
            return all(half.other in self.started for half in operation.halves)
        if self.queues[operation.rank, operation.stream % self.budget.queues][0] is not operation:
            return False
        if operation.kind in ("wait", "wait value"):
            return self.has_come(operation)
        if operation.kind in ("record", "write value", "copy"):
            return True
        return self.free(operation.rank) >= max(1, operation.ctas)

    def advance(self, operation: Operation) -> None:
        """Run an operation that can run; start or end a transfer."""
        if operation in self.running:
            self.running.remove(operation)
            self._move(operation)
        else:
            self.queues[operation.rank, operation.stream % self.budget.queues].pop(0)
            if operation.kind == "transfer":
                self.running.append(operation)
                self.started.update(operation.halves)
                self._open(operation)
                return
            if operation.kind == "record":
                self.happened.add(operation.event)
            if operation.kind == "write value":
                self.values[operation.cell] = operation.value
            if operation.run is not None and self.has_data:
                operation.run()
            if operation.after is not None and self.has_data:
                operation.after()
        self.streams[operation.rank, operation.stream].pop(0)

    def _open(self, operation: Operation) -> None:
        """Let a message arrive at any moment from now on, so what is in its place is of no use."""
        for half in operation.halves if self.has_data else ():
            self._parts[half] = half.part
            if not half.is_send:
                of_no_use = float("nan") if half.part.is_floating_point() else torch.iinfo(half.part.dtype).max
                half.part.fill_(of_no_use)

    def _move(self, operation: Operation) -> None:
        """Move the bytes of an operation's messages, unless the other end has done so."""
        for half in operation.halves if self.has_data else ():
            there = self._parts.pop(half.other, None)
            here = self._parts.pop(half, None)
            if there is not None and here is not None:
                to, source = (there, here) if half.is_send else (here, there)
                assert to.nbytes == source.nbytes, (str(operation), to.nbytes, source.nbytes)
                to.copy_(source)

    def describe(self) -> str:
        """Describe the operation at which every stream stands."""
        heads = [operations[0] for operations in self.streams.values() if operations]
        return "; ".join(f"{head}{' (runs)' if head in self.running else ''}" for head in heads)
