"""Vector clocks over the streams and hosts of all ranks of a virtual job, which find races between ranks, too.

torch's detector knows the streams of one process. Copies between ranks write to another rank's memory, ordered by
counters in shared memory, so here every stream and every host has a clock, and a counter carries its writer's.
"""

from __future__ import annotations

from typing import TypeAlias

from tests.virtual.machine import Operation

Thread: TypeAlias = tuple[int, int]
"""(rank, stream), with stream -1 for the host."""

Clock: TypeAlias = dict[Thread, int]


class Unordered(Exception):
    """Two accesses to the same memory, at least one a write, that nothing orders."""


class Clocks:
    def __init__(self) -> None:
        self._now: dict[Thread, Clock] = {}
        self._issued: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._cells: dict[int, dict[int, Clock]] = {}
        self._written: dict[int, tuple[Thread, int]] = {}
        self._read: dict[int, dict[Thread, int]] = {}

    def issued(self, operation: Operation) -> None:
        """A host issues an operation: it comes after all that the host has seen."""
        self._issued[id(operation)] = dict(self._now.get((operation.rank, -1), {}))

    def ran(self, operation: Operation, reads: set[int], writes: set[int]) -> None:
        """An operation has run. Raises: Unordered."""
        thread = operation.rank, operation.stream
        clock = self._now.setdefault(thread, {})
        _join(clock, self._issued.pop(id(operation), {}))
        clock[thread] = clock.get(thread, 0) + 1
        if operation.kind == "wait":
            _join(clock, self._events[operation.event])
        elif operation.kind == "record":
            self._events[operation.event] = dict(clock)
        elif operation.kind == "write value":
            self._cells.setdefault(operation.cell, {})[operation.value] = dict(clock)
        elif operation.kind == "wait value" and operation.value > 0:
            # What was waited for, and not what happens to have been written by now.
            enough = min(value for value in self._cells[operation.cell] if value >= operation.value)
            _join(clock, self._cells[operation.cell][enough])
        for row in reads | writes:
            self._check(operation, clock, *self._written.get(row, (thread, 0)))
        for row in writes:
            for other, tick in self._read.pop(row, {}).items():
                self._check(operation, clock, other, tick)
            self._written[row] = thread, clock[thread]
        for row in reads - writes:
            self._read.setdefault(row, {})[thread] = clock[thread]

    def _check(self, operation: Operation, clock: Clock, other: Thread, tick: int) -> None:
        if clock.get(other, 0) < tick:
            raise Unordered(f"{operation} and rank {other[0]}, stream {other[1]}")


def _join(clock: Clock, other: Clock) -> None:
    for thread, tick in other.items():
        clock[thread] = max(clock.get(thread, 0), tick)
