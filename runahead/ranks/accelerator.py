"""The seam to CUDA and NCCL: streams, events and communicators of a GPU. Other modules use none of torch's own.

So tests can put a virtual device in its place.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runahead.ranks.graphs import Graph, Graphs
from runahead.ranks.mapped import cuda_driver
from runahead.ranks.mapped.memory import Cell

T = TypeVar("T")

Stream: TypeAlias = torch.cuda.Stream
Event: TypeAlias = torch.cuda.Event
Work: TypeAlias = dist.Work

RELAY_CTAS, DIRECT_CTAS = 4, 2
"""CTAs of a link's kernels: with at most one link in and one out per rank, and with more.

A kernel that waits for its peer keeps one multiprocessor busy per CTA; NCCL itself would take 16 or 32.
"""

MOST_CTAS = 32
"""CTAs that NCCL takes at most on most machines."""

CONNECTIONS, DEFAULT_CONNECTIONS, MOST_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 8, 32
"""The variable for the number of a GPU's hardware queues, its default and its maximum."""

OTHER_STREAMS = 4
"""Streams of a rank besides those of its links: compute, posting of receives, passing on, timeline."""

WAITED = "called a synchronizing CUDA operation"
"""Words of torch's warning where the host waits for a GPU, if it was asked to."""

NO_DETECTOR = "Synchronization debug mode is a prototype"
"""Words of torch's warning when it is asked to."""


class Communicator:
    """An NCCL communicator: its operations run in the order of issue, on a stream of its own.

    An operation starts after all work that is queued on the current stream when it is issued. `Work.wait` lets the
    current stream wait for its end, and the host wait for nothing.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def isend(self, part: Tensor, peer: int) -> Work:
        """Queue the sending of a contiguous tensor."""
        return _queued(dist.isend(part, peer, self.group))

    def irecv(self, part: Tensor, peer: int) -> Work:
        """Queue the receipt of a contiguous tensor."""
        return _queued(dist.irecv(part, peer, self.group))

    def exchange(self, received: Sequence[tuple[Tensor, int]], sent: Sequence[tuple[Tensor, int]]) -> list[Work]:
        """Queue (tensor, peer) that are received and sent, all in one operation."""
        operations = [dist.P2POp(dist.irecv, part, peer, self.group) for part, peer in received]
        operations += [dist.P2POp(dist.isend, part, peer, self.group) for part, peer in sent]
        return dist.batch_isend_irecv(operations) if operations else []

    def all_reduce(self, part: Tensor) -> Work:
        """Queue the sum of a tensor over all ranks, in place."""
        return _queued(dist.all_reduce(part, group=self.group, async_op=True))

    def abort(self) -> None:
        """End all operations, also those that wait for a peer. It may block."""
        self.group.abort()


class Accelerator:
    """The streams, graphs and communicators of one GPU of this process.

    Attributes:
        graphs: all that `capture` has made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs = Graphs()
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        """The stream of this name, made on first use.

        torch has 32 streams per priority and hands them out in turn, so a stream that were made anew for every prompt
        would before long be one that something else waits on.
        """
        if name not in self._streams:
            self._streams[name] = self._new_stream()
        return self._streams[name]

    def _new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """The stream on which this thread queues work now."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Context manager in which this thread queues work on `stream`."""
        return torch.cuda.stream(stream)

    def mark(self, *, timed: bool = False) -> Event:
        """An event after all work that is queued on the current stream."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.current_stream())
        return event

    def enter_thread(self) -> None:
        """Make the GPU the current one of this thread, since threads do not inherit it."""
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """Context manager that fills its list, at the end, with operations in which the host waited for the GPU."""
        before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for each in told:
            if WAITED in str(each.message):
                waits.append(WAITED)
            elif NO_DETECTOR not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def capture(self, step: Callable[[], T]) -> Graph[T]:
        """Capture the work that `step` queues as one graph, without running it.

        Raises:
            RuntimeError: `step` does what a graph cannot hold, or an earlier one did.
        """
        stream, before = self.stream("capture"), self.current_stream()
        stream.wait_stream(before)
        with self.on(stream):
            graph = self.graphs.capture(step)
        before.wait_stream(stream)
        return graph

    def wait_value(self, cell: Cell, number: int) -> None:
        """Let the current stream wait until a cell has reached a number, without a multiprocessor."""
        cuda_driver.stream_wait_value(self.current_stream().cuda_stream, cell.address, number)

    def write_value(self, cell: Cell, number: int) -> None:
        """Set a cell once all work on the current stream is done, and what it wrote can be seen by other devices."""
        cuda_driver.stream_write_value(self.current_stream().cuda_stream, cell.address, number)

    def host_waits(self, cell: Cell, number: int, block_s: float) -> bool:
        """Let the host wait for a cell, for `block_s` seconds at most; return whether it has reached its number."""
        return cell.wait(number, block_s, by_host=False)

    def copy_into(self, arena: int, offset: int, source: Tensor) -> None:
        """Queue the copy of a contiguous tensor into an arena, `offset` bytes from its begin."""
        cuda_driver.copy(self.current_stream().cuda_stream, arena + offset, source.data_ptr(), source.nbytes)

    @property
    def num_multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def num_queues(self) -> int:
        """Hardware queues. Of several streams in one queue, one that waits holds up the others."""
        return num_connections()

    def communicator(
        self, ranks: Sequence[int] | None, timeout: timedelta, num_ctas: int | None = None
    ) -> Communicator:
        """A new communicator of these ranks, None for all. Every rank of the job calls this.

        Its stream has high priority: a send starts as soon as its data is there, rather than after the compute kernels
        that are queued already.

        Args:
            num_ctas: most CTAs of its kernels; None leaves it to NCCL.
        """
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        if num_ctas is not None:
            options.config.max_ctas = num_ctas
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, backend="nccl", timeout=timeout, pg_options=options, device_id=self.device)
        return Communicator(group)


@lru_cache
def accelerator_for(device: torch.device) -> Accelerator | None:
    """The accelerator of a GPU, one per process; None for a CPU."""
    return Accelerator(device) if device.type == "cuda" else None


def _queued(work: Work | None) -> Work:
    assert work is not None, "this process is not in the group"
    return work


def link_ctas(
    links: Collection[tuple[int, int]], num_multiprocessors: int, num_queues: int, *, has_collectives: bool = False
) -> int:
    """CTAs of the kernels of each of these links (from rank, to rank).

    With one link in and one out along a chain, a rank needs nothing of a GPU that it could be without for ever. With
    more, or with a link back, one link's kernel may have to start before another can end, or before a collective of the
    rank's stage can.

    Args:
        has_collectives: the rank shares its model with others, whose collectives need multiprocessors, too.

    Raises:
        ValueError: kernels that wait for other ranks could keep out the kernel that those wait for, since all links of
            a rank need more than half of its multiprocessors, or share hardware queues.
    """
    senders, receivers = (Counter(link[end] for link in links) for end in (0, 1))
    is_relay = max([*senders.values(), *receivers.values()], default=0) <= 1
    if is_relay and all(sender < receiver for sender, receiver in links):
        return RELAY_CTAS
    most, num_ctas = max((senders + receivers).values()), RELAY_CTAS if is_relay else DIRECT_CTAS
    cause = "reuse of prefixes" if is_relay else "prefill.transfer=direct"
    remedy = "no prefix tree" if is_relay else "prefill.transfer=relay"
    collectives = stage_ctas(num_multiprocessors) if has_collectives else 0
    if most * num_ctas > num_multiprocessors // 2 - collectives:
        raise ValueError(
            f"{cause} gives a rank {most} links, whose kernels take {most * num_ctas} of the GPU's "
            f"{num_multiprocessors} multiprocessors while they wait; use {remedy} or fewer ranks"
        )
    if most + OTHER_STREAMS + has_collectives > num_queues:
        raise ValueError(
            f"{cause} gives a rank {most} links, and {num_queues} hardware queues are too few for them; set "
            f"{CONNECTIONS}={MOST_CONNECTIONS} before CUDA starts, or use {remedy}"
        )
    return num_ctas


def stage_ctas(num_multiprocessors: int) -> int:
    """Most CTAs of the kernels of a stage's collectives.

    A collective that waits for the other ranks of its stage holds them while links hold theirs. If both did not fit at
    once, two stages could wait for each other for ever: one rank's collective would keep out a link that the collective
    of another rank waits for, in both of them.
    """
    return max(1, min(MOST_CTAS, num_multiprocessors // 4))


def exchange_ctas(num_multiprocessors: int) -> int:
    """Most CTAs of the kernels with which stages of several ranks exchange keys and values; see `stage_ctas`."""
    return max(1, min(MOST_CTAS, num_multiprocessors // 2))


def prepare_environment() -> list[str]:
    """Set what CUDA and NCCL read from the environment when they start, for ranks that send KV over NCCL.

    What is set already is kept.

    Returns:
        warnings, each a sentence.

    Raises:
        ValueError: a variable has a value with which the ranks may wait for each other for ever.
    """
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in ("", "0"):
        raise ValueError(
            "NCCL_LAUNCH_ORDER_IMPLICIT is set, which makes transfers on different links wait for each other; unset it"
        )
    if not torch.cuda.is_initialized():
        os.environ.setdefault(CONNECTIONS, str(MOST_CONNECTIONS))
        # Loading a kernel on first use may wait for the device, and so for a transfer that waits for another rank.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if (given := num_connections()) < MOST_CONNECTIONS:
        return [f"{CONNECTIONS} is {given}, so compute may wait for transfers; unset it, or set it to 32"]
    return []


def num_connections() -> int:
    """Number of hardware queues that CUDA starts with."""
    given = os.environ.get(CONNECTIONS, "")
    return int(given) if given.isdecimal() else DEFAULT_CONNECTIONS
