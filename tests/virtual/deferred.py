"""Torch operations as a GPU runs them: queued by the host, computed later."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.virtual.device import VirtualAccelerator

ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)


ON_CPUS = ("attend_sequences",)
"""Functions that ask for values where they are on a CPU, and make one call on a GPU."""


class Deferred(TorchDispatchMode):
    """Context manager in which this thread's operations on tensors are queued on the virtual GPU's current stream.

    The host computes an operation once when it is queued, on whatever its inputs hold by then, and only for the shape
    and dtype of the result; what counts is computed on the device, later. Uninitialised memory is NaN.

    Args:
        row_bytes: watch accesses to slabs for races, by rows of so many bytes; None watches nothing.

    Attributes:
        num_synchronizations: times that the host asked for a value, and so waited for the device.
        num_uploads: tensors made of the host's numbers, which a GPU would have had to copy.
    """

    def __init__(self, gpu: VirtualAccelerator, *, row_bytes: int | None = None) -> None:
        super().__init__()
        self.gpu, self.row_bytes = gpu, row_bytes
        self.num_synchronizations = self.num_uploads = 0

    def __enter__(self) -> Deferred:
        self._reads = _Reads(self)
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def synchronize(self) -> None:
        """The host asks for values that the device may not have computed yet."""
        if sys._getframe(2).f_code.co_name in ON_CPUS:
            self.gpu.mark().query()  # the values are needed all the same
            return
        self.num_synchronizations += 1
        self.gpu.current_stream().synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func in ALLOCATIONS:
            out = func(*args, **kwargs)
            if self.row_bytes is not None and out.dtype == torch.uint8:  # slabs alone are allocated as bytes
                self.gpu.watch(out, self.row_bytes)
            out.fill_(255 if out.dtype == torch.uint8 else 0 if not out.is_floating_point() else float("nan"))
            return out
        if func is torch.ops.aten._local_scalar_dense.default:
            self.synchronize()
            return func(*args, **kwargs)
        if func is torch.ops.aten.linalg_eigh.default:  # the host asks whether it has converged
            self.synchronize()
        if func is torch.ops.aten.lift_fresh.default and args[0].dim():  # a number, as in x[0] = 3, is no copy
            self.num_uploads += 1
        written = written_by(func, args, kwargs)
        if written:
            self.gpu.kernel(lambda: func(*args, **kwargs), inputs, written)
            return written[0] if len(written) == 1 else tuple(written)
        out = func(*args, **kwargs)
        memory = {each.untyped_storage().data_ptr() for each in inputs}
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        made = [each for each in made if each.untyped_storage().data_ptr() not in memory]
        if made and inputs:
            self.gpu.kernel(lambda: _again(func, args, kwargs, made), inputs, made)
        return out


class _Reads(TorchFunctionMode):
    """Sees what a host waits for that is no operation: a read of a tensor's memory, a copy of numbers to a device."""

    def __init__(self, device: Deferred) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sent = (
            func is torch.tensor and (kwargs or {}).get("device") is not None
        )  # a copy that a GPU's host waits for
        if is_sent or func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self._device.synchronize()
        return func(*args, **(kwargs or {}))


def _again(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    results = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
    for old, new in zip(made, results, strict=True):
        old.copy_(new)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found
