"""CUDA graphs of the virtual GPU: a capture records operations, and a replay runs them over the same memory.

What is captured is computed for its shapes alone. At the end of the capture memory from before has its values again,
and what was made is poisoned until a replay computes it. Numbers and tensors of the host are those of the capture. A
graph does not keep memory from before, and a replay that needs what was freed fails.

Graphs may share a pool of memory. Then what one has made may lie where an earlier one has temporary values, so a replay
poisons what graphs made that were captured after it in its pool (torch's notes on CUDA, "Graph memory management").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from tests.virtual.cuda.captures import CAPTURING, refuse_in_capture
from tests.virtual.cuda.counts import note_kernel
from tests.virtual.cuda.driver import DRIVER
from tests.virtual.deferred import written_by

PoolId: TypeAlias = tuple[int, int]

FAILED_BEFORE = "CUDA error: operation failed due to a previous error during capture"


class Allocator:
    """Pools and captures, as torch's allocator knows them.

    Attributes:
        num_uses: of each pool that is used, by its `MemPool` and by graphs.
        num_host_uses: of each pool that was used, by graphs alone, in the allocator of page-locked memory.
        recording: pools of captures that were not ended.
        ends_failed_captures: torch does that since pytorch/pytorch#180395.
    """

    def __init__(self) -> None:
        self.num_uses: dict[PoolId, int] = {}
        self.num_host_uses: dict[PoolId, int] = {}
        self.recording: list[PoolId] = []
        self.ends_failed_captures = False
        self._graphs: dict[PoolId, list[weakref.ref[CUDAGraph]]] = {}
        self._numbers = count(1)

    def new_pool(self, *, by_user: bool) -> PoolId:
        number = next(self._numbers)
        return (0, number) if by_user else (number, 0)

    def use(self, pool: PoolId) -> None:
        self.num_uses[pool] = self.num_uses.get(pool, 0) + 1

    def release(self, pool: PoolId) -> None:
        assert self.num_uses[pool] > 0, pool
        self.num_uses[pool] -= 1
        if self.num_uses[pool] == 0:
            del self.num_uses[pool]
            self._graphs.pop(pool, None)

    def begin(self, pool: PoolId) -> None:
        self.use(pool)
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.append(pool)
        if self.num_host_uses.get(pool) == 0:  # ATen/core/CachingHostAllocator.h: a pool is not forgotten
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.num_host_uses[pool] = self.num_host_uses.get(pool, 0) + 1

    def end(self, pool: PoolId) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def free_cached(self) -> None:
        """Give cached memory back, after a wait for streams that use it."""
        if self.recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def reset(self, pool: PoolId) -> None:
        """Forget a graph that was captured in a pool."""
        self.release(pool)
        self.num_host_uses[pool] -= 1

    def captured(self, graph: CUDAGraph, pool: PoolId) -> None:
        self._graphs[pool] = [*self._graphs_in(pool), weakref.ref(graph)]

    def captured_after(self, graph: CUDAGraph, pool: PoolId) -> list[CUDAGraph]:
        """Graphs in a pool that were captured after this one, and were not reset."""
        graphs = [each() for each in self._graphs_in(pool)]
        return [each for each in graphs[graphs.index(graph) + 1 :] if each is not None and each.is_captured]

    def has_graphs(self) -> bool:
        """Whether a graph was captured that was not reset."""
        graphs = [each() for pool in self._graphs for each in self._graphs_in(pool)]
        return any(each is not None and each.is_captured for each in graphs)

    def _graphs_in(self, pool: PoolId) -> list[weakref.ref[CUDAGraph]]:
        return [each for each in self._graphs.get(pool, []) if each() is not None]


ALLOCATOR = Allocator()


class MemPool:
    """Stands for torch.cuda.MemPool."""

    def __init__(self) -> None:
        self.id = ALLOCATOR.new_pool(by_user=True)
        ALLOCATOR.use(self.id)
        weakref.finalize(self, ALLOCATOR.release, self.id)

    def use_count(self) -> int:
        return ALLOCATOR.num_uses[self.id]


@dataclass(frozen=True)
class _Before:
    """A tensor in memory from before the capture, for an operation of this name."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    operation: str

    @classmethod
    def capture(cls, tensor: Tensor, operation: str) -> _Before:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), operation)

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"a graph is replayed after memory was freed that its {self.operation} needs"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    """A recorded operation.

    Attributes:
        made: the results that are in new memory, by their place among all.
    """

    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    made: Mapping[int, Tensor]

    def replay(self) -> None:
        args, kwargs = tree_map(
            lambda each: each.tensor() if isinstance(each, _Before) else each, (self.args, self.kwargs)
        )
        results = tree_leaves(self.run(*args, **kwargs))
        for place, tensor in self.made.items():
            tensor.copy_(results[place])


@dataclass(frozen=True)
class _Task:
    """Work that a stream was told in a capture: a copy between processes, an event, an operation of NCCL."""

    stream: int
    do: Callable[[], None]

    def replay(self) -> None:
        DRIVER.settle(self.stream)
        self.do()


class CUDAGraph:
    """Stands for torch.cuda.CUDAGraph.

    Attributes:
        is_captured: it can be replayed.
        has_failed: its capture cannot succeed any more.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.is_captured, self.has_failed = False, False
        self._pool: PoolId = (0, 0)
        self._operations: list[_Operation | _Task] = []
        self._made: dict[int, Tensor] = {}
        self._values_before: dict[int, tuple[Tensor, Tensor]] = {}

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        if self.is_captured:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        refuse_in_capture()
        self._pool, self._stream = pool or ALLOCATOR.new_pool(by_user=False), torch.cuda.current_stream()
        ALLOCATOR.begin(self._pool)
        CAPTURING.capture = self

    def capture_end(self) -> None:
        if torch.cuda.current_stream() != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        assert CAPTURING.capture is self
        CAPTURING.capture = None
        with torch.inference_mode(False), torch.no_grad():
            for memory, values in self._values_before.values():
                memory.copy_(values)
        self._values_before.clear()
        self.poison()
        if self.has_failed:
            self._forget()
            if ALLOCATOR.ends_failed_captures:
                ALLOCATOR.end(self._pool)
            raise torch.AcceleratorError(FAILED_BEFORE)
        ALLOCATOR.end(self._pool)
        ALLOCATOR.captured(self, self._pool)
        self.is_captured = True

    def replay(self) -> None:
        if not self.is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        refuse_in_capture()
        note_kernel("a graph")
        with torch.inference_mode(False), torch.no_grad():
            for operation in self._operations:
                operation.replay()
        for graph in ALLOCATOR.captured_after(self, self._pool):
            graph.poison()

    def reset(self) -> None:
        if self.is_captured:
            self.is_captured = False
            ALLOCATOR.reset(self._pool)
        self._forget()

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> PoolId:
        if not self.is_captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def record(
        self,
        func: OpOverload,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host: Collection[Tensor] = (),
    ) -> Any:
        """Record an operation and return results of the shapes that it has.

        Args:
            run: computes it on CPU tensors, which the arguments and the results are.
            host: arguments that are on the host.
        """
        if self.has_failed:
            raise torch.AcceleratorError(FAILED_BEFORE)
        written = written_by(func, args, kwargs)
        for tensor in written:
            self._keep_values(tensor)
        fixed = {id(each): each.clone() for each in host if not any(each is one for one in written)}
        args, kwargs = tree_map(lambda each: fixed.get(id(each), each), (args, kwargs))
        results = run(*args, **kwargs)
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = {
            place: each
            for place, each in enumerate(tree_leaves(results))
            if isinstance(each, Tensor) and _memory(each) not in given
        }
        self._made |= {_memory(each): each for each in made.values()}
        if written or (made and not func._schema.name.startswith(("aten::empty", "aten::new_empty"))):
            own = self._made.keys() | {_memory(each) for each in fixed.values()}

            def kept(value: Any) -> Any:
                is_before = isinstance(value, Tensor) and _memory(value) not in own
                return _Before.capture(value, func._schema.name) if is_before else value

            args, kwargs = tree_map(kept, (args, kwargs))
            self._operations.append(_Operation(run, args, kwargs, made))
        return results

    def queue(self, stream: int, task: Callable[[], None]) -> None:
        """Record what a stream is told, which is not done now."""
        if self.has_failed:
            raise torch.AcceleratorError(FAILED_BEFORE)
        self._operations.append(_Task(stream, task))

    def poison(self) -> None:
        """Overwrite what the capture has made."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self._made.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                elif tensor.dtype != torch.bool:
                    tensor.fill_(torch.iinfo(tensor.dtype).min)

    def _keep_values(self, tensor: Tensor) -> None:
        key = _memory(tensor)
        if key not in self._made and key not in self._values_before:
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._values_before[key] = memory, memory.clone()

    def _forget(self) -> None:
        self._operations.clear()
        self._made.clear()


def _memory(tensor: Tensor) -> int:
    """Tensors share memory if this is the same, as long as they live."""
    return int(tensor.untyped_storage()._cdata)
