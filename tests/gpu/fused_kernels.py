"""The calls of CUDA's fused kernels in runahead/attention/partial.py: those in its source, and those that were made.

They are told apart by function, operator, and the parameters of the function that are flags or may be None. So a new
kernel, a new flag or a new option of one is a call that no test has made yet.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from runahead.attention import partial


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A call of an operator with one value of one parameter of the function that makes it; or just the call."""

    function: str
    operator: str
    parameter: str = ""
    value: str = ""


def calls_in_source() -> set[KernelCall]:
    """All calls in the source of operators that only a GPU has."""
    with open(partial.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return {call for function in tree.body if isinstance(function, ast.FunctionDef) for call in _calls_in(function)}


def _calls_in(function: ast.FunctionDef) -> Iterator[KernelCall]:
    for each in ast.walk(function):
        if not isinstance(each, ast.Call) or not ast.unparse(each.func).startswith("torch.ops.aten."):
            continue
        operator = ast.unparse(each.func).removeprefix("torch.ops.aten.")
        if operator.endswith("_for_cpu"):
            continue
        yield KernelCall(function=function.name, operator=operator)
        for given in (*function.args.args, *function.args.kwonlyargs):
            annotation = ast.unparse(given.annotation) if given.annotation else ""
            values = ("True", "False") if annotation == "bool" else ("None", "given") if "None" in annotation else ()
            for value in values:
                yield KernelCall(function=function.name, operator=operator, parameter=given.arg, value=value)


class NotingCalls(TorchDispatchMode):
    """Notes the calls of these operators that are made meanwhile, also on a virtual GPU.

    Attributes:
        made: the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: set[KernelCall] = set()
        self._in_source = calls_in_source()
        self._operators = {each.operator for each in self._in_source}

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operator = func._schema.name.removeprefix("aten::")
        if operator in self._operators:
            frame = _calling_frame()
            for each in self._in_source:
                if (each.function, each.operator) == (frame.f_code.co_name, operator):
                    value = frame.f_locals.get(each.parameter)
                    told = str(value) if isinstance(value, bool) else "None" if value is None else "given"
                    if not each.parameter or told == each.value:
                        self.made.add(each)
        return func(*args, **(kwargs or {}))


def _calling_frame() -> FrameType:
    """The innermost frame in runahead/attention/partial.py."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != partial.__file__:
        frame = frame.f_back
    assert frame is not None, "a fused kernel is called from elsewhere"
    return frame
