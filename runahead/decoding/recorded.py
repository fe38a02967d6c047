"""Decoding steps on a CPU as a program: what one step has called is called again in C++, as a GPU replays a graph."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runahead.failures import first_line
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.model import Model

READ_BY_HOST = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
"""Methods that read the numbers of a tensor without an operator; others ask for them by one, which C++ sees."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
"""Largest difference of a replayed step's logits, of the largest of them: a few roundings in each layer."""

MOST_KEPT_BYTES = 1 << 20
"""Memory up to this size that a step changes is put back before it is computed once more: numbers and lengths. Keys and
values are larger, and the step stores the same again in the same slots."""


class Program:
    """A recorded step. A call computes it once more, over the same memory.

    Attributes:
        result: what the step returned, which each call overwrites.
        changed: memory that the step changes and that was there before it.
        names: operators that a call computes, in brackets those that torch's dispatcher does.
    """

    def __init__(self, number: int, result: Tensor) -> None:
        self.result = result
        self.changed: Sequence[Tensor] = torch.ops.runahead.changed(number)
        self.names: Sequence[str] = torch.ops.runahead.names(number)
        self._number, self._replay = number, torch.ops.runahead.replay.default
        weakref.finalize(self, torch.ops.runahead.forget.default, number)

    def __call__(self) -> Tensor:
        self._replay(self._number)
        return self.result


class _Reading(TorchFunctionMode):
    """Notes that the host reads what a step computes."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (name := READ_BY_HOST.get(func)) is not None:
            torch.ops.runahead.refuse(f"{name} reads numbers that the step computes")
        return func(*args, **(kwargs or {}))


def recorded(step: Callable[[], Tensor]) -> tuple[Tensor, Program | str]:
    """Run a step, and record the operators that it calls.

    Args:
        step: computes the same on the same tensors whenever it is called.

    Returns:
        what the step returned; its program, or why there can be none.
    """
    torch.ops.runahead.record()
    try:
        with _Reading():
            result = step()
    except BaseException:
        torch.ops.runahead.refuse("it failed")  # so nothing of it is held
        torch.ops.runahead.forget(torch.ops.runahead.recorded())
        raise
    number: int = torch.ops.runahead.recorded()
    if reason := torch.ops.runahead.why_not(number):
        torch.ops.runahead.forget(number)
        return result, reason
    return result, Program(number, result)


class RecordedStep:
    """A step that is recorded when it is first called, compared with its program in the next call, and then replayed.

    The second step finds what the first one cannot: a number that is another one in each step.

    Args:
        step: as of `recorded`.
        model: whose step it is. What cannot be replayed is told once, and not tried again.
    """

    def __init__(self, step: Callable[[], Tensor], model: Model) -> None:
        self._step, self._model = step, model
        self._program: Program | None = None
        self._is_checked = False

    def __call__(self) -> Tensor:
        """Logits (B, V), which the next call may overwrite."""
        if self._is_checked:
            assert self._program is not None
            return self._program()
        if self._program is not None:
            return self._checked(self._program)
        if self._model.unrecordable:
            return self._step()
        logits_BV, program = recorded(self._step)
        if isinstance(program, str):
            self._give_up(program)
        else:
            self._program = program
        return logits_BV

    def _checked(self, program: Program) -> Tensor:
        """The next step by the program, and then as the model computes it."""
        small = [each for each in program.changed if each.nbytes <= MOST_KEPT_BYTES]
        kept, replayed_BV = [each.clone() for each in small], program().clone()
        counts = [each.clone() for each in small if not each.is_floating_point()]
        for each, before in zip(small, kept, strict=True):
            each.copy_(before)
        logits_BV = self._step()
        apart = _apart(replayed_BV, logits_BV)
        same = all(map(torch.equal, counts, (each for each in small if not each.is_floating_point())))
        self._is_checked = same and apart <= TOLERANCE[self._model.dtype]  # not where it is NaN
        if not self._is_checked:
            self._program = None
            what = f"logits differ by {apart:.2g} of the largest" if same else "the number of tokens differs"
            self._give_up(f"of a replayed step {what}")
        return logits_BV

    def _give_up(self, reason: str) -> None:
        self._model.unrecordable = first_line(RuntimeError(reason))
        warnings.warn(f"decoding runs without a recorded step: {self._model.unrecordable}", stacklevel=3)


def _apart(ours: Tensor, known: Tensor) -> float:
    """Largest difference, of the largest number."""
    if not known.numel():
        return 0.0
    largest, apart = known.double().abs().max().item(), (ours.double() - known.double()).abs().max().item()
    return apart / largest if largest else apart


def records(model: Model) -> bool:
    """Whether decoding steps of a model are recorded, where they repeat."""
    if not KERNELS.in_use or model.device.type != "cpu" or not model.repeats_steps:
        return False
    return all(
        each.key_dim == each.value_dim and operators.take(each.dtype, each.key_dim, each.value_dim)
        for each in model.kv_shapes
    )
