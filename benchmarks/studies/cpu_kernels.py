"""How fast is attention on a CPU by our own kernels, beside PyTorch's, on one thread?

    python -m benchmarks.studies.cpu_kernels

A chunk attends to itself, or one query to all keys of 30 layers, which do not stay in the processor's caches. Both ways
take turns in one process, and the medians are over all rounds. Useful operations are those of the scores that a query
sees and of their weights (4 H each); the bound of one query is the time in which memory is read, as PyTorch adds up as
many bytes. Heads are those of SmolLM2-135M.
"""

# Legend: B batch (1), N query heads, K KV heads, T tokens, H head dim.

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option
from runahead.attention.partial import cpu_flash
from runahead.kernels import operators
from runahead.model.loading.kernels import load_if_built

N, K, H = 9, 3, 64
SCALING = H**-0.5
LAYERS = 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FIELDS = ("kind", "tokens", "dtype")

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


@contextmanager
def prepare(options: Namespace) -> Iterator[None]:
    """One thread, and the kernels."""
    if reason := load_if_built():
        raise ValueError(reason)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def variants(options: Namespace) -> Iterator[Variant]:
    """Each kind and length in each dtype."""
    for dtype in options.dtypes:
        for kind in ("chunk", "one query"):
            yield from ({"kind": kind, "tokens": tokens, "dtype": dtype} for tokens in options.tokens)


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """Time both ways and reading, in turns."""
    num_tokens, dtype = variant["tokens"], DTYPES[variant["dtype"]]
    is_chunk = variant["kind"] == "chunk"
    layers = [_keys_and_values(num_tokens, dtype) for _layer in range(1 if is_chunk else LAYERS)]
    q_BNCH = torch.randn(1, num_tokens if is_chunk else 1, N, H).to(dtype).transpose(1, 2)
    slabs = [slab_TBKX.view(-1).view(torch.int64) for slab_TBKX, _, _ in layers]

    def attending(attend: Attend) -> Callable[[], object]:
        return lambda: [attend(q_BNCH, k, v, is_chunk, SCALING) for _, k, v in layers]

    ways = {"ours": attending(operators.attend), "pytorch": attending(cpu_flash)}
    if not is_chunk:
        ways["reading"] = lambda: [slab.sum() for slab in slabs]
    taken_ms: dict[str, list[float]] = {way: [] for way in ways}
    for _round in range(options.rounds):
        for way, run in ways.items():
            began_s = time.perf_counter()
            run()
            taken_ms[way].append(1e3 * (time.perf_counter() - began_s))
    scores = num_tokens * (num_tokens + 1) / 2 if is_chunk else num_tokens * LAYERS
    yield variant | {
        "rounds": options.rounds,
        "flops": 4 * H * N * scores,
        "bytes": sum(slab.nbytes for slab in slabs),
        "ms": {way: median(each) for way, each in taken_ms.items()},
        "least_ms": {way: min(each) for way, each in taken_ms.items()},
    }


def _keys_and_values(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A slab as the cache has it, token-major, and its keys and values (B, K, T, H)."""
    slab_TBKX = torch.randn(num_tokens, 1, K, 2 * H).to(dtype)
    k_BKTH, v_BKTH = slab_TBKX.permute(1, 2, 0, 3).split(H, dim=-1)
    return slab_TBKX, k_BKTH, v_BKTH


def _rate(line: Line, way: str) -> str:
    ms = line["ms"].get(way)
    if ms is None:
        return ""
    if line["kind"] == "chunk":
        return f"{line['flops'] / ms / 1e6:.0f} GFLOP/s"
    return f"{line['bytes'] / ms / 1e6:.1f} GB/s"


TABLE = Table(
    lines=newest(*FIELDS),
    columns={
        "attention of": lambda line: f"{line['kind']}, {line['tokens']:,} tokens",
        "dtype": lambda line: line["dtype"],
        "ours": lambda line: _rate(line, "ours"),
        "PyTorch": lambda line: _rate(line, "pytorch"),
        "reading": lambda line: _rate(line, "reading"),
        "time of PyTorch's": lambda line: f"{line['ms']['ours'] / line['ms']['pytorch']:.2f}",
    },
)

STUDY = Study(
    name="cpu_kernels",
    text=__doc__,
    has="least_ms",
    variants=variants,
    prepare=prepare,
    measure=measure,
    table=TABLE,
    options={
        "tokens": option([1024, 4096], "lengths"),
        "dtypes": option(list(DTYPES), "of queries, keys and values"),
        "rounds": option(9, "of all ways in turns"),
    },
)

if __name__ == "__main__":
    STUDY.main()
