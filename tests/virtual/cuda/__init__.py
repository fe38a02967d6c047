"""A virtual GPU with values: "cuda:0" on a CPU build of torch, so that code for GPUs runs, is checked and is counted.

It shows what a GPU would compute, refuse and wait for; not how long it takes, nor what depends on the order of streams.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from runahead.cache.host import memory as host_memory
from runahead.ranks.accelerator import Accelerator, accelerator_for
from runahead.ranks.mapped import cuda_driver
from tests.virtual.cuda.captures import CAPTURING
from tests.virtual.cuda.counts import Counts, counting, get_sync_debug_mode, note_kernel, set_sync_debug_mode
from tests.virtual.cuda.device import CPU, LAUNCHES_NOTHING, GpuTensor, dispatch
from tests.virtual.cuda.driver import DRIVER
from tests.virtual.cuda.generators import GENERATOR, Generator
from tests.virtual.cuda.graphs import ALLOCATOR
from tests.virtual.cuda.guard import load_guard
from tests.virtual.cuda.memory import HOST, at_address
from tests.virtual.cuda.nccl import communicator, destroy_process_group
from tests.virtual.cuda.torch_cuda import CUDA, Stream

__all__ = ["Counts", "GpuTensor", "counting", "gpu", "virtual_gpu"]

aten = torch.ops.aten

FACTORIES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.tril_indices.default,
    aten.triu_indices.default,
)
"""Operations that make a tensor of nothing; torch makes all others with `empty`."""


def gpu() -> AbstractContextManager[None]:
    """A real GPU if there is one, else a virtual one while the context lasts."""
    return nullcontext() if torch.cuda.is_available() else virtual_gpu()


@contextmanager
def virtual_gpu() -> Iterator[None]:
    """Context manager in which this process, in all its threads, has a virtual GPU.

    Raises:
        ValueError, OSError: see `load_guard`.
    """
    load_guard()
    kernels = torch.library.Library("aten", "IMPL")
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    with (
        patch.multiple(torch.cuda, **CUDA),
        patch.object(cuda_driver, "_library", lambda: DRIVER),
        patch.object(Accelerator, "communicator", communicator),
        patch.object(dist, "destroy_process_group", destroy_process_group),
        patch.multiple(torch, **_functions()),
        patch.multiple(Tensor, **_methods()),
        patch.multiple(torch._C, **_allocator()),
    ):
        try:
            _forget()
            torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter's `data` cannot become a subclass
            for factory in FACTORIES:
                kernels.impl(factory.name(), _on_gpu(factory), "CUDA")
            kernels.impl("aten::copy_", _copy, "CUDA")  # inside torch.tensor, where tensor subclasses are not asked
            yield
        finally:
            kernels._destroy()
            torch.__future__.set_swap_module_params_on_conversion(swapped)
            _forget()


def _forget() -> None:
    """Drop what the process keeps of a GPU, also what a test that failed has left."""
    gc.collect()
    accelerator_for.cache_clear()
    host_memory._arena = host_memory._Arena()
    gc.collect()
    CAPTURING.capture = None
    ALLOCATOR.recording.clear()
    if get_sync_debug_mode():
        set_sync_debug_mode("default")
    GENERATOR.manual_seed(torch.Generator("cpu").initial_seed())  # the seed before any is set
    HOST._registered.clear()
    cuda_driver._registered.clear()
    cuda_driver._device_address.cache_clear()


def _on_gpu(factory: Any) -> Any:
    name = factory._schema.name

    def made(*args: Any, device: object = None, pin_memory: bool | None = None, **kwargs: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if name not in LAUNCHES_NOTHING:
            note_kernel(name)
        kwargs, capture = kwargs | {"device": CPU}, CAPTURING.capture
        with torch.inference_mode(False):
            made = factory(*args, **kwargs) if capture is None else capture.record(factory, factory, args, kwargs)
            return GpuTensor(made)

    return made


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    result: Tensor = dispatch(aten.copy_.default, (target, source, non_blocking), {})
    return result


def _functions() -> dict[str, Any]:
    """Functions of torch that a CPU build has, but not for a GPU."""
    as_tensor, empty = torch.as_tensor, torch.empty

    def as_tensor_of_gpu(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, Tensor) or not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, *args, **kwargs)
        return GpuTensor(at_address(data))

    def empty_page_locked(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return HOST.own(made) if pin_memory else made

    return {"as_tensor": as_tensor_of_gpu, "empty": empty_page_locked, "Generator": Generator, "Stream": Stream}


def _allocator() -> dict[str, Any]:
    """Names of torch._C for its allocator, likewise."""
    return {
        "_cuda_endAllocateToPool": lambda device, pool: ALLOCATOR.end(pool),
        "_cuda_releasePool": lambda device, pool: ALLOCATOR.release(pool),
    }


def _methods() -> dict[str, Any]:
    """Methods of torch.Tensor, likewise."""
    storage = Tensor.untyped_storage

    def untyped_storage(self: Tensor) -> torch.UntypedStorage:
        return storage(self.held if isinstance(self, GpuTensor) else self)

    def pin_memory(self: Tensor, device: object = None) -> Tensor:
        return self if HOST.has(self) else HOST.own(self.clone())

    def is_pinned(self: Tensor, device: object = None) -> bool:
        return HOST.has(self)

    return {"untyped_storage": untyped_storage, "pin_memory": pin_memory, "is_pinned": is_pinned}
