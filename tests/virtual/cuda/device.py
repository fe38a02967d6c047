"""Tensors that are on "cuda:0" for everyone who asks, and are computed on the CPU.

Each holds a CPU tensor. An operation on them is checked as CUDA would check it, and then runs on the CPU tensors. So
values, dtypes, shapes, strides and aliases are true; times, the order of streams and rounding are not. A composite
operation is taken apart first, as torch takes it apart for CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from tests.virtual.cuda.captures import CAPTURING
from tests.virtual.cuda.counts import note_kernel, note_pageable, note_wait
from tests.virtual.cuda.generators import GENERATOR
from tests.virtual.cuda.kernels import KERNELS
from tests.virtual.cuda.memory import DEVICE, HOST, Lease

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

aten = torch.ops.aten


class GpuTensor(torch.Tensor):
    """A tensor of the virtual GPU.

    Attributes:
        held: the CPU tensor with its values. Two tensors of the GPU share memory if these do.
        lease: counts its memory.
    """

    held: Tensor
    lease: Lease

    # Operations come to `__torch_dispatch__` alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a normal tensor, as `held` is, also for code under inference mode
                return cls.__new__(cls, held)
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=GPU
        )
        made.held, made.lease = held, DEVICE.hold(held.untyped_storage())
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GpuTensor({self.held!r})"

    def tolist(self) -> Any:
        note_wait("tolist")
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def is_pinned(self, device: object = None) -> bool:
        return False

    def record_stream(self, stream: object) -> None:
        """Nothing: memory lives as long as Python has it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            copy = GpuTensor(self.held.clone())
        return torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a tensor of a GPU is pickled: send it to the CPU first")


# What CUDA's kernels accept of the host.


def _names(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


MAY_SEE_HOST_SCALARS = _names(
    """_index_put_impl_ addcdiv addcmul clamp fill_ index_put index_put_ lerp lerp_ masked_fill masked_fill_ where"""
)
"""Operations, beside those that torch tags as pointwise, that take a tensor of no dimension from the host."""

COPIES = _names("copy_ copy _to_copy is_same_size set_")

INDEXED = _names("index _unsafe_index index_put index_put_ _index_put_impl_")
"""Operations that copy indices to the device if they are on the host, and count those of a mask."""

MAY_COPY = _names("copy_ _to_copy repeat_interleave")
"""Operations that copy between host and device, or look at numbers there, by their arguments."""

WAITS = _names(
    """_linalg_check_errors _local_scalar_dense _unique _unique2 bincount equal masked_select multinomial nonzero
    unique_consecutive unique_dim"""
)
"""Operations that look at a result on the host."""

NOT_ON_GPUS = ("_for_cpu", "mkldnn", "onednn", "quantized::", "_int8pack")
"""Parts of the names of operations that CUDA has no kernel for."""

LAUNCHES_NOTHING = _names(
    """_local_scalar_dense _unsafe_view detach empty empty_like empty_strided is_same_size new_empty new_empty_strided
    record_stream resize_ set_"""
)
"""Operations beside views that queue no work."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Facts about an operation by its name and schema, which torch tells slowly.

    Attributes:
        taken_apart: torch's own function that takes it apart for every device, if it has one.
        run: what computes it on the CPU.
        is_on_gpus: CUDA has a kernel for it.
        launches: it queues work.
        may_wait: for some arguments the host waits, see `note_waits_of`.
        is_mutable: it writes to one of its arguments.
        sees_scalars: it takes a tensor of no dimension from the host.
        has_generator: it draws random numbers.
    """

    name: str
    taken_apart: Callable[..., Any] | None
    run: Callable[..., Any]
    is_on_gpus: bool
    launches: bool
    may_wait: bool
    is_mutable: bool
    sees_scalars: bool
    has_generator: bool


@functools.cache
def known(func: OpOverload) -> Operation:
    name = func._schema.name
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Operation(
        name=name,
        taken_apart=_taken_apart(func) if is_composite and name not in KERNELS else None,
        run=KERNELS.get(name) or REPLACED.get(name) or func,
        is_on_gpus=not any(part in name for part in NOT_ON_GPUS),
        launches=name not in LAUNCHES_NOTHING and not func.is_view,
        may_wait=name in INDEXED | WAITS | MAY_COPY or name.startswith("aten::masked_fill"),
        is_mutable=func._schema.is_mutable,
        sees_scalars=torch.Tag.pointwise in func.tags or name in MAY_SEE_HOST_SCALARS,
        has_generator=any(each.name == "generator" for each in func._schema.arguments),
    )


def _taken_apart(func: OpOverload) -> Callable[..., Any]:
    own = functools.partial(func._op_dk, DispatchKey.CompositeImplicitAutograd)
    if func._schema.name != "aten::matmul":
        return own

    def matmul(a: Tensor, b: Tensor) -> Any:
        """torch squeezes the product of a vector in place, which is not emulated."""
        return own(a[None], b).squeeze(-2) if a.dim() == 1 < b.dim() else own(a, b)

    return matmul


def dispatch(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation of which some tensors are on the GPU.

    Raises:
        RuntimeError: CUDA would refuse it.
        NotImplementedError: CUDA has no kernel for it, or it cannot be emulated.
    """
    operation = known(func)
    if operation.taken_apart is not None:
        return operation.taken_apart(*args, **kwargs)
    name, tensors = operation.name, tensors_in(args, kwargs)
    if not operation.is_on_gpus:
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend.")
    of_host = [each for each in tensors if not isinstance(each, GpuTensor)]
    if of_host:
        require_one_device(func, args, of_host)
    if operation.may_wait:
        note_waits_of(name, args, kwargs)
    if operation.launches:
        note_kernel(name)
    args_on_cpu = [held_by(each) for each in args]
    kwargs_on_cpu = {key: held_by(each) for key, each in kwargs.items() if key != "pin_memory"}
    if operation.has_generator and kwargs_on_cpu.get("generator") is None:
        kwargs_on_cpu["generator"] = GENERATOR
    with torch._C._InferenceMode(False):  # at its end the mode of gradients is as before, too
        torch._C._set_grad_enabled(False)
        capture = CAPTURING.capture
        if capture is None:
            result = operation.run(*args_on_cpu, **kwargs_on_cpu)
        else:
            result = capture.record(func, operation.run, args_on_cpu, kwargs_on_cpu, of_host)
        if operation.is_mutable and any(held_by(each).shape != each.shape for each in tensors):
            raise NotImplementedError(f"{name} changes the shape of a tensor in place, which is not emulated")
        if kwargs.get("device") == CPU:
            return HOST.own(result) if kwargs.get("pin_memory") or kwargs.get("non_blocking") else result
        return on_gpu(result, {id(held_by(each)): each for each in tensors})


def require_one_device(func: OpOverload, args: Sequence[Any], of_host: Sequence[Tensor]) -> None:
    """Raises: RuntimeError, for a tensor of the host that a kernel of the GPU would read."""
    operation = known(func)
    if operation.name in COPIES:
        return
    takes_indices = operation.name in INDEXED and isinstance(args[0], GpuTensor)
    indices = set(map(id, tensors_in(args[1:2], {}))) if takes_indices else set()
    for each in of_host:
        if (each.dim() == 0 and operation.sees_scalars) or id(each) in indices:
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({func}, a tensor {tuple(each.shape)} of {each.dtype} is on the CPU)"
        )


def note_waits_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count the waits of the host in an operation. Raises: RuntimeError, see `note_wait`."""
    if name in INDEXED:
        for index in tensors_in(args[1:2], {}):
            if not isinstance(index, GpuTensor):
                note_wait(f"{name} by an index on the host")
            elif index.dtype in (torch.bool, torch.uint8):
                note_wait(f"{name} by a mask")
    elif name == "aten::copy_":
        target, source, *rest = args
        if isinstance(target, GpuTensor) != isinstance(source, GpuTensor):
            host = source if isinstance(target, GpuTensor) else target
            non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
            _note_copy("to the GPU" if host is source else "to the host", host, non_blocking)
    elif name == "aten::_to_copy":
        if kwargs.get("device") == CPU and not kwargs.get("non_blocking"):  # else torch makes page-locked memory
            note_wait("copy to the host")
    elif (
        name in WAITS
        or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None)
        or (name.startswith("aten::masked_fill") and isinstance(args[2], GpuTensor))
    ):
        note_wait(name)


def _note_copy(what: str, host: Tensor, non_blocking: bool) -> None:
    if not non_blocking:
        note_wait(f"copy {what}")
    elif not HOST.has(host):
        note_pageable(f"copy {what}")


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of an operation's arguments, also those in lists."""
    found = list[Tensor]()
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [one for one in each if isinstance(one, Tensor)]
    return found


def held_by(value: Any) -> Any:
    """An argument, or a list of them, as the CPU has it."""
    if isinstance(value, GpuTensor):
        return value.held
    if isinstance(value, (list, tuple)):
        return type(value)(map(held_by, value))
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def on_gpu(value: Any, given: Mapping[int, Tensor]) -> Any:
    """A result, or a list of them, as the GPU has it.

    Args:
        given: arguments by the `id` of what the CPU has of them.
    """
    if isinstance(value, Tensor):
        return given[id(value)] if id(value) in given else GpuTensor(value)
    return type(value)(on_gpu(each, given) for each in value) if isinstance(value, (list, tuple)) else value


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`aten.histc`, which CUDA has for integers, too."""
    if x.is_floating_point():
        return torch.histc(x, bins, min, max)
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


def _softmax(function: Callable[..., Tensor], x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`aten._softmax` and `aten._log_softmax`, which CUDA also has from half precision to float32."""
    return function(x, dim, dtype=torch.float32 if half_to_float else None)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """A CPU has no product in another dtype than that of its factors."""
    return torch.mm(a, b, **kwargs) if out_dtype is None else torch.mm(a.to(out_dtype), b.to(out_dtype), **kwargs)


REPLACED: dict[str, Callable[..., Any]] = {
    "aten::histc": _histc,
    "aten::mm": _mm,
    "aten::_softmax": functools.partial(_softmax, torch.softmax),
    "aten::_log_softmax": functools.partial(_softmax, torch.log_softmax),
}
"""Operations that a CPU has in another form."""
