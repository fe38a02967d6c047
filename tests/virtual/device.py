"""A virtual accelerator: ranks are threads of this process, of which one runs at a time, and tensors are the CPU's.

It takes the place of `runahead.ranks.accelerator.Accelerator` under the production code. Kernels, events and messages
are queued and run later, in an order that the test chooses, and every access to memory is told to torch's detector of
races (`torch.cuda._sanitizer`), which knows the order that events enforce.
"""

from __future__ import annotations

import itertools
import mmap
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler

from runahead.ranks.accelerator import Accelerator, Communicator
from runahead.ranks.groups import ProcessGroups
from runahead.ranks.mapped.memory import Cell, MappedSegment
from runahead.ranks.mapped.queues import DeviceCopying
from runahead.ranks.ranks import Ranks
from runahead.ranks.transfer_records import TransferRecords
from tests.virtual.clocks import Clocks
from tests.virtual.machine import Budget, Half, Machine, Operation
from tests.virtual.mapped import VirtualMemory

POOL = 32
"""Streams per priority that torch has; it hands them out in turn."""

COMPUTE = 0
"""Number of the default stream."""


class Deadlock(Exception):
    """Nothing can run, and not everything has."""


class Race(Exception):
    """Two accesses to the same memory, at least one a write, that no event orders."""


class Unwatched(Exception):
    """A host waits for what does not come unless another rank goes on, in a call in which nobody watches that rank."""


class Event:
    def __init__(self, gpu: VirtualAccelerator) -> None:
        self.gpu, self.number = gpu, gpu.job.next_event()

    def query(self) -> bool:
        """Wait for the event: a host that asks again and again gets the same, and tests end sooner."""
        self.gpu.job.host_waits(self.gpu, self)
        return True

    def synchronize(self) -> None:
        """Raises: Unwatched."""
        self.gpu.job.host_waits(self.gpu, self, is_watched=self.gpu.is_watched)

    def elapsed_time(self, later: Event) -> float:
        return 1.0

    @property
    def has_happened(self) -> bool:
        return self.number in self.gpu.job.machine.happened


class Stream:
    def __init__(self, gpu: VirtualAccelerator, number: int) -> None:
        self.gpu, self.number = gpu, number

    def record_event(self) -> Event:
        event = Event(self.gpu)
        self.gpu.queue(self, "record", event=event.number)
        self.gpu.races._handle_event_record(event.number, self.number)
        return event

    def wait_event(self, event: Event) -> None:
        self.gpu.queue(self, "wait", event=event.number)
        self.gpu.races._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Work:
    def __init__(self, gpu: VirtualAccelerator, end: Event) -> None:
        self._gpu, self._end = gpu, end

    def wait(self) -> None:
        self._gpu.current_stream().wait_event(self._end)

    def is_completed(self) -> bool:
        return self._end.has_happened


class VirtualCommunicator(Communicator):
    """One rank's end of a communicator. `number` is the same on all ranks, which make them in the same order."""

    def __init__(self, gpu: VirtualAccelerator, number: int, ctas: int, members: Sequence[int]) -> None:
        self._gpu, self._number, self._ctas, self._members = gpu, number, ctas, members
        self._stream = gpu.pooled_stream("high")
        self._numbers: Counter[tuple[int, int]] = Counter()

    def isend(self, part: torch.Tensor, peer: int) -> Work:
        return self.exchange([], [(part, peer)])[0]

    def irecv(self, part: torch.Tensor, peer: int) -> Work:
        return self.exchange([(part, peer)], [])[0]

    def exchange(self, received: Sequence[tuple[Any, int]], sent: Sequence[tuple[Any, int]]) -> list[Work]:
        if not received and not sent:
            return []
        halves = [self._half(part, peer, is_send=False) for part, peer in received]
        halves += [self._half(part, peer, is_send=True) for part, peer in sent]
        self._stream.wait_stream(self._gpu.current_stream())
        self._gpu.queue(self._stream, "transfer", halves=tuple(halves), ctas=self._ctas)
        self._gpu.num_messages += len(halves)
        self._gpu.access(self._stream, [part for part, _ in sent], [part for part, _ in received])
        return [Work(self._gpu, self._stream.record_event())]

    def all_reduce(self, part: torch.Tensor) -> Work:
        """A collective as it occupies the GPU: it ends once all members have begun theirs. Nothing is added up."""
        peers = [peer for peer in self._members if peer != self._gpu.rank]
        return self.exchange([(torch.empty_like(part), peer) for peer in peers], [(part, peer) for peer in peers])[0]

    def _half(self, part: torch.Tensor, peer: int, *, is_send: bool) -> Half:
        ends = (self._gpu.rank, peer) if is_send else (peer, self._gpu.rank)
        self._numbers[ends] += 1
        return Half(self._number, *ends, self._numbers[ends], is_send, part)


class VirtualAccelerator(Accelerator):
    """One rank's GPU.

    Attributes:
        races: torch's detector. It is asked about `watched` memory only, by the token: a row of a slab is one id.
        num_messages, num_kernels: how many were queued.
        is_watched: the host is in a wait that ends if another rank does.
    """

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(torch.device("cpu"))
        self.job, self.rank, self.races = job, rank, EventHandler()
        self.watched: list[tuple[torch.Tensor, int]] = []
        self.num_messages = self.num_kernels = 0
        self.is_watched = False
        self._pools: dict[str, Iterator[int]] = {"normal": count(), "high": count()}
        self._current = [Stream(self, COMPUTE)]
        self._num_communicators = count()
        self.communicators: list[VirtualCommunicator] = []

    def pooled_stream(self, priority: str) -> Stream:
        """The next stream of a pool; streams 1 to 32 have normal priority, 33 to 64 high."""
        number = next(self._pools[priority]) % POOL
        return Stream(self, 1 + number + (POOL if priority == "high" else 0))

    def _new_stream(self) -> Stream:
        return self.pooled_stream("normal")

    def current_stream(self) -> Stream:
        return self._current[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def mark(self, *, timed: bool = False) -> Event:
        return self.current_stream().record_event()

    def enter_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        numbers = {each.stream for each in self.job.programs[self.rank] if each.stream >= 0} | {COMPUTE}
        for number in sorted(numbers):
            Stream(self, number).synchronize()

    @property
    def num_multiprocessors(self) -> int:
        return self.job.machine.budget.multiprocessors

    @property
    def num_queues(self) -> int:
        return self.job.machine.budget.queues

    def communicator(
        self, ranks: Sequence[int] | None, timeout: timedelta, num_ctas: int | None = None
    ) -> Communicator:
        members = list(range(self.job.size)) if ranks is None else ranks
        made = VirtualCommunicator(self, next(self._num_communicators), self.job.ctas or num_ctas or 16, members)
        self.communicators.append(made)
        return made

    def queue(self, stream: Stream, kind: str, **what: Any) -> None:
        """Append an operation to a stream, as the host does."""
        self.job.issue(Operation(rank=self.rank, stream=stream.number, kind=kind, **what))

    def kernel(
        self, run: Callable[[], object] | None = None, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """Queue a kernel on the current stream."""
        self.queue(self.current_stream(), "kernel", run=run)
        self.num_kernels += 1
        self.access(self.current_stream(), reads, writes)

    def wait_value(self, cell: Cell, number: int) -> None:
        self.queue(self.current_stream(), "wait value", cell=cell.address, value=number)

    def write_value(self, cell: Cell, number: int) -> None:
        self.queue(self.current_stream(), "write value", cell=cell.address, value=number)

    def host_waits(self, cell: Cell, number: int, block_s: float) -> bool:
        self.job.host_does(Operation(rank=self.rank, stream=-1, kind="wait value", cell=cell.address, value=number))
        return True

    def copy_into(self, arena: Any, offset: int, source: torch.Tensor) -> None:
        target = arena[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
        self.queue(self.current_stream(), "copy", run=lambda: target.copy_(source))
        self.num_messages += 1
        self.access(self.current_stream(), [source], [target])

    def access(self, stream: Stream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Tell the detector which watched memory an operation reads and writes. Raises: Race."""
        read, written = ({row for tensor in each for row in self._rows(tensor)} for each in (reads, writes))
        if self.job.clocks is not None:
            self.job.touch(self.job.programs[self.rank][-1], read, written)
        elif read or written:
            found = self.races._handle_kernel_launch(
                stream.number, read - written, written, set(), "", defaultdict(list)
            )
            if found:
                raise Race(str(found[0]).splitlines()[0])

    def watch(self, slab: torch.Tensor, row_bytes: int) -> None:
        """Watch accesses to a slab from now on."""
        self.watched.append((slab, row_bytes))

    def _rows(self, tensor: torch.Tensor) -> Iterator[int]:
        """Addresses of the rows of watched slabs that a tensor is part of."""
        if tensor.numel() == 0:
            return
        first = tensor.data_ptr()
        last = (
            first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.itemsize
        )
        for slab, row_bytes in [each for gpu in self.job.gpus for each in gpu.watched]:
            begin, end = slab.data_ptr(), slab.data_ptr() + slab.nbytes
            if begin <= first < end:
                yield from range(begin + (first - begin) // row_bytes * row_bytes, last + 1, row_bytes)


class VirtualRanks(Ranks):
    """One rank of a virtual job; communicators are made and warmed up by the code of `Ranks` itself."""

    accelerator: VirtualAccelerator

    def __init__(self, job: Job, rank: int) -> None:
        ProcessGroups.__init__(self, rank, job.size, timeout_s=60.0)
        self.accelerator = VirtualAccelerator(job, rank)
        self.device, self.backend, self.local_size = torch.device("cpu"), "nccl", job.size
        self.copying, self.unmapped, self._is_mapped, self.mapped_links = None, None, True, set()
        self.records, self._collective, self._longest_call_s = TransferRecords(), None, 0.0

    @contextmanager
    def _stuck_in(self, what: str) -> Iterator[None]:
        before, self.accelerator.is_watched = self.accelerator.is_watched, True
        try:
            with super()._stuck_in(what):
                yield
        finally:
            self.accelerator.is_watched = before


Choose = Callable[[list[Operation]], Operation]


def transfers_early(ready: list[Operation]) -> Operation:
    return next((each for each in ready if each.kind == "transfer"), ready[0])


def transfers_late(ready: list[Operation]) -> Operation:
    return next((each for each in ready if each.kind != "transfer"), ready[0])


def copies_early(ready: list[Operation]) -> Operation:
    return next((each for each in ready if each.kind == "copy"), ready[0])


def copies_late(ready: list[Operation]) -> Operation:
    return next((each for each in ready if each.kind != "copy"), ready[0])


def at_random(seed: int) -> Choose:
    return random.Random(seed).choice


class Job:
    """Ranks that run a function each, on virtual GPUs.

    Args:
        choose: which of the operations that can run runs next.
        ctas: of every transfer, whatever the production code asks for.
        hosts: of every rank; those of one host can copy to each other. None: none can.

    Attributes:
        programs: what each host has issued.
    """

    def __init__(
        self,
        size: int,
        *,
        choose: Choose = transfers_early,
        budget: Budget | None = None,
        ctas: int | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        self.size, self.choose, self.ctas = size, choose, ctas
        self.programs: list[list[Operation]] = [[] for _ in range(size)]
        self.machine = Machine(self.programs, budget or Budget(), has_data=True)
        self._events = count(1)
        self.ranks = [VirtualRanks(self, rank) for rank in range(size)]
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._scheduler = threading.Semaphore(0)
        self._waiting: dict[int, Operation] = {}
        self._stuck: Deadlock | None = None
        self.gpus = [ranks.accelerator for ranks in self.ranks]
        self.arenas: list[torch.Tensor] = []
        self.segments = [mmap.mmap(-1, MappedSegment.num_bytes(size)) for _ in range(size)]
        self.clocks = None if hosts is None else Clocks()
        self._touched: dict[int, tuple[set[int], set[int]]] = {}
        for ranks in self.ranks:
            if hosts is None:
                break
            ranks.copying = DeviceCopying(ranks.accelerator, VirtualMemory(self, ranks.rank, hosts))
            pairs = itertools.permutations(range(size), 2)
            ranks.mapped_links = {(one, other) for one, other in pairs if hosts[one] == hosts[other]}

    def next_event(self) -> int:
        return next(self._events)

    def touch(self, operation: Operation, read: set[int], written: set[int]) -> None:
        """Note which rows an operation will access."""
        before = self._touched.get(id(operation), (set(), set()))
        self._touched[id(operation)] = before[0] | read, before[1] | written

    def _ran(self, operation: Operation) -> None:
        assert self.clocks is not None
        self.clocks.ran(operation, *self._touched.pop(id(operation), (set(), set())))

    def issue(self, operation: Operation) -> None:
        self.programs[operation.rank].append(operation)
        if self.clocks is not None:
            self.clocks.issued(operation)
            operation.after = partial(self._ran, operation)
        issued = self.machine.issue(operation.rank)
        assert issued or operation.stream < 0

    def host_waits(self, gpu: VirtualAccelerator, event: Event, *, is_watched: bool = True) -> None:
        """Let the other ranks and the GPUs run until an event has happened. Raises: Unwatched."""
        wait = Operation(rank=gpu.rank, stream=-1, kind="wait", event=event.number)
        if not is_watched:
            self._require_alone(wait)
        self.host_does(wait)
        gpu.races._handle_event_synchronization(event.number)

    def _require_alone(self, wait: Operation) -> None:
        """Require that a rank's GPU comes to an event by itself, even if all other ranks stop now."""
        trial = self.machine.copy()
        while not trial.has_come(wait):
            own = next((each for each in trial.ready() if each.rank == wait.rank), None)
            if own is None:
                raise Unwatched(trial.describe())
            trial.advance(own)

    def host_does(self, operation: Operation) -> None:
        """Let a host write a value, or wait for one or for an event while the other ranks and the GPUs run."""
        rank = operation.rank
        self.programs[rank].append(operation)
        if operation.kind != "write value" and not self.machine.has_come(operation):
            self._waiting[rank] = operation
            self._scheduler.release()
            self._turns[rank].acquire()
            if self._stuck is not None:
                raise self._stuck
        self.machine.issue(rank)
        if self.clocks is not None:
            self.clocks.ran(operation, set(), set())

    def run(self, body: Callable[[VirtualRanks], Any]) -> list[Any]:
        """Results of `body` on every rank, once all GPUs are done. Raises: Deadlock, and what `body` raises."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = body(self.ranks[rank])
            except BaseException as error:
                errors.append(error)
            self._ended.append(rank)
            self._scheduler.release()

        self._ended: deque[int] = deque()
        for rank in range(self.size):
            threading.Thread(target=thread, args=(rank,), daemon=True).start()
        runnable = list(range(self.size))
        while len(self._ended) < self.size:
            for rank in runnable:
                self._waiting.pop(rank, None)
                self._turns[rank].release()
                self._scheduler.acquire()
            runnable = [rank for rank, wait in self._waiting.items() if self.machine.has_come(wait)]
            if errors:
                self._stuck = self._stuck or Deadlock("another rank failed")
            if self._stuck is not None:
                runnable = list(self._waiting)
            elif not runnable and not self._step() and self._waiting:
                self._stuck = Deadlock(self.machine.describe())
                runnable = list(self._waiting)
        if errors:
            raise errors[0]
        while self._step():
            pass
        if not self.machine.is_finished:
            raise Deadlock(self.machine.describe())
        return results

    def _step(self) -> bool:
        with torch.inference_mode():
            ready = list(self.machine.ready())
            if ready:
                self.machine.advance(self.choose(ready))
        return bool(ready)
