"""Torch calls inside attention, per layer and step of each way of decoding on a CPU: the time of a short text's token.

python -m tests.virtual.calls              a table, with the kernels of a whole layer on the virtual GPU
python -m tests.virtual.calls slabs "4 bits of 512 tokens"
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from launch.program.text_table import text_table
from runahead.attention.base import LayerAttention
from runahead.model.seam import ATTENTION_NAME, attention_function, register
from tests.virtual.cuda import virtual_gpu
from tests.virtual.ways import CPU, FEW_LAYERS, FROM_TOKEN, MORE_LAYERS, TO_TOKEN, WAYS, Window, asked_of_gpu, llama

ALL, WORK = "all", "work"

VIEWS = frozenset(f"aten::{name}" for name in ("_unsafe_view", "detach", "flatten", "numpy_T", "reshape", "unflatten"))
"""Operations that are seen whole in inference mode, and mostly return a view, beside those that torch knows as such."""


class Calls(NamedTuple):
    """Torch calls inside attention.

    Attributes:
        layer: per layer and step; work: those of them that are no views.
        once: per step, however many layers there are; negative where the first layers do less, such as quest's.
    """

    layer: float
    work: float
    once: float


class _Counting(TorchDispatchMode):
    """Counts calls while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[ALL] += 1
        self.counts[WORK] += not (func.is_view or func._schema.name in VIEWS)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Counted:
    """The attention of a forward, counted."""

    attention: LayerAttention
    counting: _Counting

    def attend(self, *args: Any) -> Tensor:
        with self.counting:
            return self.attention.attend(*args)


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Context manager that counts the calls inside the attention of every forward meanwhile."""
    counting = _Counting()

    def counted(*args: Any, runahead: LayerAttention, **keywords: Any) -> Any:
        return attention_function(*args, runahead=_Counted(runahead, counting), **keywords)  # type: ignore[arg-type]

    AttentionInterface.register(ATTENTION_NAME, counted)
    try:
        yield counting.counts
    finally:
        register()


def calls_of(name: str) -> Calls:
    """Torch calls of a way of decoding in float32, on average of some steps."""
    decode, num_kv_heads = WAYS[name]
    steps = []
    for num_layers in (FEW_LAYERS, MORE_LAYERS):
        model = llama(num_layers, num_kv_heads, CPU)
        with counting_calls() as counts:
            window = Window(partial(Counter, counts))
            decode(model, window)
        steps.append(window.between(FROM_TOKEN, TO_TOKEN))
    few, more = steps
    layer, work = ((more[name] - few[name]) / (MORE_LAYERS - FEW_LAYERS) for name in (ALL, WORK))
    return Calls(layer, work, few[ALL] - FEW_LAYERS * layer)


def main(names: Sequence[str]) -> None:
    """Print the table of these ways, or of all that run on a CPU as well."""
    if unknown := [name for name in names if name not in WAYS]:
        raise SystemExit(f"no way of decoding is called {unknown[0]!r}; there are: {', '.join(WAYS)}")
    names = names or [name for name in WAYS if not name.startswith(("ungrouped", "replayed"))]
    rows: list[Sequence[str]] = [("way of decoding", "calls", "no views", "once a step", "kernels of a layer on a GPU")]
    for name in names:
        calls = calls_of(name)
        with virtual_gpu():
            kernels = asked_of_gpu(name).kernels
            llama.cache_clear()
        rows.append((name, *(f"{number:g}" for number in (*calls, kernels))))
    print(text_table(rows, left=(0,)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
