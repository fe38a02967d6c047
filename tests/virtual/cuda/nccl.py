"""NCCL of the virtual GPU: communicators over Gloo between processes that have a virtual GPU each.

As NCCL's, an operation starts after all that its stream was told before, the operations of a communicator run one after
the other on a stream of its own, and the host waits for none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from runahead.ranks.accelerator import Accelerator, Communicator
from tests.virtual.cuda.device import held_by
from tests.virtual.cuda.driver import DRIVER, Happening
from tests.virtual.cuda.graphs import ALLOCATOR
from tests.virtual.cuda.torch_cuda import Event, Stream, current_stream


class VirtualWork:
    """Stands for `dist.Work`."""

    def __init__(self) -> None:
        self.ended = Happening()

    def wait(self) -> bool:
        current_stream().wait_for(self.ended)
        return True

    def is_completed(self) -> bool:
        return self.ended.reached(0)


class VirtualCommunicator(Communicator):
    """A Gloo group whose operations are queued on a stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._stream = Stream()

    def isend(self, part: Tensor, peer: int) -> Any:
        return self.exchange([], [(part, peer)])[0]

    def irecv(self, part: Tensor, peer: int) -> Any:
        return self.exchange([(part, peer)], [])[0]

    def exchange(self, received: Sequence[tuple[Tensor, int]], sent: Sequence[tuple[Tensor, int]]) -> list[Any]:
        own = dist.get_rank()
        to_self = [part for part, peer in sent if peer == own]
        from_self = [part for part, peer in received if peer == own]

        def exchange() -> None:
            works = [dist.irecv(held_by(part), peer, self.group) for part, peer in received if peer != own]
            works += [dist.isend(held_by(part), peer, self.group) for part, peer in sent if peer != own]
            for target, source in zip(from_self, to_self, strict=True):
                held_by(target).copy_(held_by(source))
            for work in works:
                assert work is not None, "this process is not in the group"
                work.wait()

        return [self._queue(exchange)] if received or sent else []

    def all_reduce(self, part: Tensor) -> Any:
        return self._queue(lambda: dist.all_reduce(held_by(part), group=self.group))

    def _queue(self, operation: Callable[[], object]) -> VirtualWork:
        work, before = VirtualWork(), Event()
        before.record()

        def run() -> None:
            operation()
            work.ended.set()

        DRIVER.queue(self._stream.cuda_stream, run, [(before.recorded, 0)], may_block=True)
        return work

    def abort(self) -> None:
        """Nothing: an operation that waits for a peer keeps no process from ending.

        Raises:
            RuntimeError: there is a graph, which may hold operations. NCCL would wait for its end for ever.
        """
        if ALLOCATOR.has_graphs():
            raise RuntimeError("a communicator is aborted while there is a graph")


_destroy_process_group, _made = dist.destroy_process_group, weakref.WeakSet[VirtualCommunicator]()


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Stands for `dist.destroy_process_group`. Raises: RuntimeError, as `VirtualCommunicator.abort`."""
    if _made and ALLOCATOR.has_graphs():
        raise RuntimeError("a process group is destroyed while there is a graph")
    _destroy_process_group(group)


def communicator(
    gpu: Accelerator, ranks: Sequence[int] | None, timeout: timedelta, num_ctas: int | None = None
) -> Communicator:
    """Stands for `Accelerator.communicator`."""
    members = None if ranks is None else list(ranks)
    made = VirtualCommunicator(dist.new_group(members, backend="gloo", timeout=timeout))
    _made.add(made)
    return made
