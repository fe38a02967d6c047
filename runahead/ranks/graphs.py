"""CUDA graphs: captured steps of a GPU, with the memory in which they compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from runahead.failures import first_line

T = TypeVar("T")


class Graph(Generic[T]):
    """A captured step. A call queues its work and returns what the step returned, which every call overwrites.

    Attributes:
        destroy: destroys the graph, so that calls raise RuntimeError. That happens at the latest when nothing holds
            this object any more, or at the end of the process.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T, destroy: Callable[[], None]) -> None:
        self._graph, self._result = graph, result
        self.destroy = weakref.finalize(self, destroy)

    def __call__(self) -> T:
        self._graph.replay()
        return self._result


class Graphs:
    """All graphs of one GPU, which are captured on one stream and replayed on one stream.

    A graph holds the addresses of what it reads, such as a prompt's cache, so it serves that prompt alone. It computes
    in a pool of memory of its own as long as it lives: in a shared one, its temporary values might lie where a graph
    that was captured later has its results. The next graph takes over the pool, so prompts that are decoded one after
    the other need one.
    """

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Graph[Any]] = weakref.WeakSet()
        self._free_pools: list[torch.cuda.MemPool] = []
        self._keepers: list[Graph[None]] = []
        self._failed: tuple[str, torch.cuda.CUDAGraph, torch.cuda.MemPool] | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing can be captured any more, since a capture failed; None if none did."""
        return None if self._failed is None else self._failed[0]

    def capture(self, step: Callable[[], T]) -> Graph[T]:
        """Capture the work that `step` queues on the current stream, without running it.

        `torch.cuda.graph` is not used: it gives all cached memory back first, and if the capture fails it leaves the
        thread on its own stream.

        Raises:
            RuntimeError: `step` does what a graph cannot hold, or an earlier one did. Nothing is captured after that,
                since torch makes no promise for its state then.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)
        graph, pool = torch.cuda.CUDAGraph(), self._free_pools.pop() if self._free_pools else self._new_pool()
        with self._recording(graph, pool):
            result = step()
        captured = Graph(graph, result, partial(self._destroy, graph, pool))
        self._living.add(captured)
        return captured

    def destroy(self) -> None:
        """Destroy all graphs, also those that something holds, such as the traceback of an error."""
        for graph in list(self._living):
            graph.destroy()
        self._keepers.clear()
        self._free_pools.clear()  # without their keepers

    def _new_pool(self) -> torch.cuda.MemPool:
        """A pool of memory with a tiny graph that stays in it.

        torch's allocator of page-locked memory counts the graphs in a pool, but not its `MemPool`: it refuses a graph
        in a pool whose last one was reset (ATen/core/CachingHostAllocator.h, `create_or_incref_pool_under_lock`).

        Raises: as `_recording`.
        """
        graph, pool, cell_1 = torch.cuda.CUDAGraph(), torch.cuda.MemPool(), torch.empty(1, device="cuda")
        with self._recording(graph, pool):
            cell_1.zero_()  # torch warns of a graph with nothing in it
        keeper = Graph(graph, None, graph.reset)
        self._keepers.append(keeper)
        self._living.add(keeper)
        return pool

    def _destroy(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
        graph.reset()
        self._free_pools.append(pool)

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> Iterator[None]:
        """Context manager in which what is queued on the current stream is recorded, and does not run.

        Raises:
            RuntimeError: it cannot be recorded. An error inside the block is raised rather than what it leads to.
        """
        num_uses = pool.use_count()
        error: BaseException | None = None
        try:
            # Other threads may call CUDA meanwhile.
            graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                yield
            except BaseException as raised:
                error = raised
            graph.capture_end()
        except RuntimeError as raised:
            error = error or raised
            _end_recording(graph, pool, num_uses)
            self._failed = first_line(error), graph, pool  # kept: torch may still refer to both
        else:
            if error is not None:
                self._destroy(graph, pool)
        if error is not None:
            raise error


def _end_recording(graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool, num_uses: int) -> None:
    """Let torch's allocator forget a capture that failed.

    As long as it takes the capture to go on, it frees nothing that several streams have used, and fails where it would
    wait for the device, as it does when memory runs short (pytorch/pytorch#180395, #190308).

    Args:
        num_uses: of the pool before the capture.
    """
    graph.reset()
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # torch has done so
        torch._C._cuda_endAllocateToPool(device, pool.id)
    if pool.use_count() > num_uses:
        torch._C._cuda_releasePool(device, pool.id)
