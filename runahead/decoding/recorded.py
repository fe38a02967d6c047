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
"""Largest difference of a replayed step's logits, of the largest of them: a few roundings in each layer. A program with
products in 8 bits has none, since a last bit more may be a code more."""

MOST_KEPT_BYTES = 1 << 20
"""Memory up to this size that a step changes is put back before it is computed once more: numbers and lengths. Keys and
values are larger, and the step stores the same again in the same slots."""

FAR = 100
"""Times the median logit of a row beyond which a number is none that the model has computed, but rules a token out."""

MOST_STEPS = 8
"""Recorded steps that a model keeps between prompts: for so many numbers of rows, one prompt's or a server's."""

MOST_STEP_BYTES = 32 << 20
"""Memory of all these, which no plan counts. One that takes more, of many rows and a large vocabulary, goes with its
prompt."""

COMPARED_ROOMS = 2
"""Sizes of later prompts' memory in which a program is compared before it is trusted in any."""

UNRECORDED = 2
"""Steps before one is recorded, as before a GPU's graph: recording and comparing take the time of some three steps."""

FIRST_REPLAYS = 16
"""Replayed steps after which a program is compared again; from then on after as many times more."""


class Program:
    """A recorded step. A call computes it once more, over the same memory.

    Attributes:
        result: what the step returns, which each call overwrites.
        names: operators that a call computes, in brackets those that torch's dispatcher does.
        num_bytes: memory of what a call computes, which tensors share that are not needed at the same time.
    """

    def __init__(self, number: int) -> None:
        self.result: Tensor = torch.ops.runahead.result(number)
        self.names: Sequence[str] = torch.ops.runahead.names(number)
        self.num_bytes: int = torch.ops.runahead.num_bytes(number)
        self._number, self._replay = number, torch.ops.runahead.replay.default
        weakref.finalize(self, torch.ops.runahead.forget.default, number)

    def __call__(self) -> Tensor:
        self._replay(self._number)
        return self.result

    @property
    def changed(self) -> Sequence[Tensor]:
        """Memory that the step changes and that was there before it."""
        found: Sequence[Tensor] = torch.ops.runahead.changed(self._number)
        return found

    def move_to(self, memory: Sequence[Tensor]) -> bool:
        """Compute in this memory in place of that which it was recorded over, from now on. False: it cannot.

        Args:
            memory: as of `recorded`, of the same shapes, but for more or less slots of keys and values.
        """
        can_move: bool = torch.ops.runahead.move_to(self._number, memory)
        return can_move

    def let_go(self) -> bool:
        """Hold nothing of that memory, until it has moved. False: it holds more of its prompt."""
        can_let_go: bool = torch.ops.runahead.let_go(self._number)
        return can_let_go

    def difference(self, again: Program) -> str:
        """In what the step that was recorded once more is another one; "" if it is the same."""
        found: str = torch.ops.runahead.difference(self._number, again._number)
        return found


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


def recorded(step: Callable[[], Tensor], memory: Sequence[Tensor] = ()) -> tuple[Tensor, Program | str]:
    """Run a step, and record the operators that it calls.

    Args:
        step: computes the same on the same tensors whenever it is called.
        memory: what it finds of its prompt, each tensor in memory of its own, which can be exchanged.

    Returns:
        what the step returned, which its program leaves alone; the program, or why there can be none.
    """
    torch.ops.runahead.record()
    try:
        with _Reading():
            result = step()
    except BaseException:
        torch.ops.runahead.refuse("it failed")  # so nothing of it is held
        torch.ops.runahead.forget(torch.ops.runahead.recorded(None, []))
        raise
    # Another class comes from an operator that was refused.
    number: int = torch.ops.runahead.recorded(result if type(result) is Tensor else None, memory)
    if reason := torch.ops.runahead.why_not(number):
        torch.ops.runahead.forget(number)
        return result, reason
    return result, Program(number)


class RecordedStep:
    """A step that is recorded, compared with its program in the next call, and then replayed.

    Its first calls are not recorded: they may make what later ones find, and an answer of so few tokens is no faster. A
    program is compared twice: its calls with those of the step when it is recorded once more, so that a number of the
    host that is another one in each step is found however little it changes; and its logits with the step's own, which
    finds what no call shows. Both come again after 16, 256, ... replayed steps, for what changes seldom.

    It outlives its prompt: `take_step` gives it to a later one, in whose memory the program computes then. It is
    compared in the first step there, too, until it was right in memory of COMPARED_ROOMS sizes.

    Args:
        step: as of `recorded`.
        model: whose step it is. What cannot be replayed is told once, and not tried again.
        memory: as of `recorded`.
    """

    def __init__(self, step: Callable[[], Tensor], model: Model, memory: Sequence[Tensor] = ()) -> None:
        self._step: Callable[[], Tensor] | None = step
        self._model: Model | None = model
        self._memory = memory
        self._tolerance = TOLERANCE[model.dtype]
        self._program: Program | None = None
        self._num_plain = self._num_replayed = self._until_check = 0
        self._until_next = FIRST_REPLAYS
        self._is_again = self._has_moved = self._is_of_one_prompt = False
        self._rooms = set[tuple[int, ...]]()

    @property
    def num_bytes(self) -> int:
        """Memory of what it computes, besides that of its prompt."""
        return 0 if self._program is None else self._program.num_bytes

    def leave(self) -> bool:
        """Hold nothing of the prompt and the model, after its last step. False: no other prompt can have this step."""
        self._step, self._model, self._memory = None, None, ()
        return not self._is_of_one_prompt and (self._program is None or self._program.let_go())

    def enter(self, step: Callable[[], Tensor], model: Model, memory: Sequence[Tensor]) -> bool:
        """Compute the step of another prompt from now on. False: it cannot."""
        if self._program is not None and not self._program.move_to(memory):
            return False
        self._step, self._model, self._memory = step, model, memory
        is_known = _room(memory) in self._rooms or len(self._rooms) >= COMPARED_ROOMS
        self._has_moved = self._program is not None and not is_known
        return True

    def __call__(self) -> Tensor:
        """Logits (B, V), which the next call may overwrite."""
        assert self._step is not None and self._model is not None, "it has left its prompt"
        if self._program is not None:
            if not self._until_check or self._has_moved:
                return self._checked(self._program, self._step, self._model)
            self._until_check, self._num_replayed = self._until_check - 1, self._num_replayed + 1
            return self._program()
        self._num_plain += 1
        if self._model.unrecordable or self._num_plain <= UNRECORDED:
            return self._step()
        logits_BV, program = recorded(self._step, self._memory)
        if isinstance(program, str):
            self._give_up(program, self._model)
        else:
            self._program = program
        return logits_BV

    def _checked(self, program: Program, step: Callable[[], Tensor], model: Model) -> Tensor:
        """The next step by the program, and then as the model computes it."""
        has_moved, self._has_moved = self._has_moved, False
        small = [each for each in program.changed if each.nbytes <= MOST_KEPT_BYTES]
        kept, replayed_BV = [each.clone() for each in small], program().clone()
        counts = [each.clone() for each in small if not each.is_floating_point()]
        for each, before in zip(small, kept, strict=True):
            each.copy_(before)
        logits_BV, again = recorded(step, self._memory)
        if isinstance(again, str):
            self._give_up(again, model)
            return logits_BV
        if difference := program.difference(again):
            if has_moved:  # of this prompt nothing was replayed yet, and none after it gets this step
                self._program, self._is_again, self._is_of_one_prompt = again, True, True
                self._num_replayed, self._until_check, self._until_next = 0, 0, FIRST_REPLAYS
            elif self._is_again or self._num_replayed:
                self._give_up(difference, model)
            else:  # the step before may have made what this one has found
                self._program, self._is_again = again, True
            return logits_BV
        apart, are_all = _apart(replayed_BV, logits_BV)
        if not all(map(torch.equal, counts, (each for each in small if not each.is_floating_point()))):
            self._give_up("of a replayed step the number of tokens differs", model)
        elif apart > self._tolerance:
            self._give_up(f"of a replayed step logits differ by {apart:.2g} of the largest", model)
        elif not are_all:
            self._has_moved = has_moved
        else:
            if has_moved:
                self._rooms.add(_room(self._memory))
            if not self._until_check:
                self._until_check, self._until_next = self._until_next, self._until_next * FIRST_REPLAYS
        return logits_BV

    def _give_up(self, reason: str, model: Model) -> None:
        self._program = None
        if self._num_replayed:
            reason += f" (after {self._num_replayed} replayed steps, some of which may be wrong)"
        model.unrecordable = first_line(RuntimeError(reason))
        warnings.warn(f"decoding runs without a recorded step: {model.unrecordable}", stacklevel=3)


def take_step(
    model: Model, step: Callable[[], Tensor], numbers: Sequence[Tensor], slabs: Sequence[Tensor], kind: str
) -> tuple[RecordedStep, Callable[[], None]]:
    """A recorded step for a prompt: one that an earlier prompt has left, or a new one.

    Args:
        step: as of `RecordedStep`.
        numbers: its memory of a size that is the same in all prompts of as many rows.
        slabs: its memory that has more or less slots in another prompt.
        kind: steps of the same kind compute the same in such memory, whatever prompt it is of.

    Returns:
        the step, and what leaves it to later prompts.
    """
    sizes = [*(each.shape for each in numbers), *(each.shape[1:] for each in slabs)]
    memory = [*numbers, *slabs]
    key = (kind, *((each.dtype, each.stride(), size) for each, size in zip(memory, sizes, strict=True)))
    kept: RecordedStep | None = model.recorded_steps.pop(key, None)
    found = kept if kept is not None and kept.enter(step, model, memory) else RecordedStep(step, model, memory)
    of_model = weakref.ref(model)

    def leave() -> None:
        can_leave = found.leave() and found.num_bytes <= MOST_STEP_BYTES
        if can_leave and (known := of_model()) is not None and not known.unrecordable:
            steps: dict[Any, RecordedStep] = known.recorded_steps
            steps.pop(key, None)
            steps[key] = found
            while len(steps) > MOST_STEPS or sum(each.num_bytes for each in steps.values()) > MOST_STEP_BYTES:
                del steps[next(iter(steps))]

    return found, leave


def _room(memory: Sequence[Tensor]) -> tuple[int, ...]:
    """Slots of each tensor of a memory."""
    return tuple(len(each) for each in memory)


def _apart(ours_BV: Tensor, known_BV: Tensor) -> tuple[float, bool]:
    """Largest difference of logits, of the largest of their row; and whether all rows could be compared.

    Not a row with a NaN or that is infinite, which ends alone. What a model rules out has minus infinity in both, or a
    number that is far from the others and no measure of them.
    """
    if not known_BV.numel():
        return 0.0, True
    ours_BV, known_BV = ours_BV.double(), known_BV.double()
    ruled_out_BV = known_BV == -torch.inf
    are_numbers_B = (known_BV.isfinite() | ruled_out_BV).all(dim=-1) & ~ruled_out_BV.all(dim=-1)
    ours_BV, known_BV = ours_BV[are_numbers_B], known_BV[are_numbers_B]
    apart = 0.0
    for ours_V, known_V in zip(ours_BV, known_BV, strict=True):
        size_V = known_V[known_V.isfinite()].abs()
        largest = size_V[size_V <= FAR * size_V.median()].max()
        apart_V = torch.where(ours_V == known_V, 0.0, (ours_V - known_V).abs() / known_V.abs().clamp(min=largest))
        apart = max(apart, apart_V.nan_to_num(torch.inf).max().item())
    return apart, bool(are_numbers_B.all())


def records(model: Model) -> bool:
    """Whether decoding steps of a model are recorded, where they repeat: not once that has turned out to be in vain."""
    if not KERNELS.in_use or model.device.type != "cpu" or not model.repeats_steps or model.unrecordable:
        return False
    return all(
        each.key_dim == each.value_dim and operators.take(each.dtype, each.key_dim, each.value_dim)
        for each in model.kv_shapes
    )
