"""Random weights without the memory of them: how each large weight is made is recorded, and repeated when it is needed.

A family initialises its weights by operations in place, which draw from one generator in order. While a model is built
under `Recorder`, large weights have no memory; each drawing operation runs on a temporary tensor, so that the generator
goes on as always, and its state before is kept. So a weight can be made by itself later, with the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LEAST_BYTES = 2**20
"""Smaller tensors are made as always."""

OVERWRITING = ("normal_", "uniform_", "zero_", "fill_", "copy_")
"""Operations in place whose result does not depend on what was there."""


class NotRepeatable(Exception):
    """A family makes its weights in a way that cannot be recorded."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One operation in place, on a tensor or a view of it; `state` is the generator's before it, if it draws."""

    operation: Callable[..., Any]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    state: Tensor | None

    def run(self, whole: Tensor, generator: torch.Generator | None) -> None:
        view = whole.as_strided(self.size, self.stride, self.offset)
        drawing = {} if self.state is None else {"generator": generator}
        self.operation(view, *self.args, **(self.keywords | drawing))


class Scratch:
    """Memory in which one tensor at a time is made: made anew each time, they would leave holes in the heap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def like(self, empty: Tensor) -> Tensor:
        """A tensor like one without memory, with any values."""
        num_bytes = empty.untyped_storage().nbytes()
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)  # freed first
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._bytes[:num_bytes].view(empty.dtype).as_strided(empty.size(), empty.stride())


@dataclass(kw_only=True)
class Recipe:
    """How a tensor is made, and a stored tensor for `runahead.model.loading.sharing`: any part of it can be had.

    Attributes:
        empty: the tensor without memory.
        scratch: where the whole tensor is made.
    """

    empty: Tensor
    scratch: Scratch
    steps: list[RecordedStep] = field(default_factory=list)

    def get_shape(self) -> list[int]:
        return list(self.empty.shape)

    def get_dtype(self) -> torch.dtype:
        return self.empty.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Make the whole tensor, and return a copy of a part of it. One thread at a time calls this."""
        whole = self.scratch.like(self.empty)
        generator = torch.Generator(self.scratch.device)
        with torch.no_grad():
            for step in self.steps:
                if step.state is not None:
                    generator.set_state(step.state)
                step.run(whole, generator)
            return whole[index].clone(memory_format=torch.contiguous_format)


class NoMeta(TorchFunctionMode):
    """While it is open, no tensor says that it has no memory: `torch.nn.init.trunc_normal_` does nothing to those."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == IS_META else func(*args, **(kwargs or {}))


IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """While it is open, large tensors made by `torch.empty` on `device` have no memory, and a recipe each.

    Raises:
        NotRepeatable: such a tensor is read, or changed by something else than an operation in place on it alone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._scratch = Scratch(device)
        self._recipes: dict[int, Recipe] = {}
        self._pretence = NoMeta()

    def __enter__(self) -> Recorder:
        self._pretence.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._pretence.__exit__(*exception)

    def recipe(self, tensor: Tensor) -> Recipe | None:
        """How a tensor without memory, or the one that it is a view of, is made; None for others."""
        return self._recipes.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format and self._is_large(args[0], keywords):
            empty = func(*args, **(keywords | {"device": torch.device("meta")}))
            self._recipes[empty.untyped_storage()._cdata] = Recipe(empty=empty, scratch=self._scratch)
            return empty
        recorded = [each for each in args if isinstance(each, Tensor) and self.recipe(each) is not None]
        if not recorded:
            return func(*args, **keywords)
        arguments = func._schema.arguments
        written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
        if any(written):
            if not written[0] or any(written[1:]) or recorded != [args[0]] or not isinstance(args[0], Tensor):
                raise NotRepeatable(str(func))
            draws = any(each.name == "generator" for each in arguments)
            self._record(func, args[0], args[1:], keywords, draws=draws)
            return args[0]
        if not all(each.alias_info is not None for each in func._schema.returns) or not func._schema.returns:
            raise NotRepeatable(str(func))  # it reads values that are not there
        return func(*args, **keywords)  # a view

    def _is_large(self, size: Any, keywords: dict[str, Any]) -> bool:
        dtype, device = keywords.get("dtype") or torch.get_default_dtype(), keywords.get("device")
        is_here = device is None or torch.device(device).type == self._device.type
        return is_here and torch.Size(size).numel() * dtype.itemsize >= LEAST_BYTES

    def _record(
        self, func: Any, target: Tensor, args: tuple[Any, ...], keywords: dict[str, Any], *, draws: bool
    ) -> None:
        recipe = self.recipe(target)
        assert recipe is not None
        if keywords.get("generator") is not None:
            raise NotRepeatable(f"{func} with a generator of its own")
        state = self._state() if draws else None
        step = RecordedStep(
            operation=func,
            size=tuple(target.size()),
            stride=tuple(target.stride()),
            offset=int(target.storage_offset()),
            args=args,
            keywords=keywords,
            state=state,
        )
        if draws:  # advances the generator
            step.run(self._scratch.like(recipe.empty), None)
        covers = target.numel() == recipe.empty.numel()
        if covers and func._schema.name.removeprefix("aten::") in OVERWRITING:
            recipe.steps.clear()
        recipe.steps.append(step)

    def _state(self) -> Tensor:
        return torch.get_rng_state() if self._device.type == "cpu" else torch.cuda.get_rng_state(self._device)
