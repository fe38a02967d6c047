"""Jobs of the doctor on live ranks: `python -m benchmarks.doctor.tasks <JSON of a JobTask>`, started by its crew."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor.crew import Job
from benchmarks.harness.random_prompts import random_ids
from benchmarks.ttft.flops import matmul_rate
from benchmarks.ttft.traffic import kv_bytes_per_token
from launch.program.ending import end_with
from launch.program.launcher import follow_launcher
from launch.program.signals import ending_signals
from partitioner.cost.link import Link
from partitioner.measure import ping
from runahead.attention.partial import fused_kernel
from runahead.attention.sparse import flex
from runahead.config import (
    SPARSE_BLOCK,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    ModelOptions,
    PrefillName,
    PrefillOptions,
    RanksOptions,
)
from runahead.engine import Engine
from runahead.files import write_whole
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS, NUMBERS
from runahead.model.model import Model
from runahead.model.shares import check_shares
from runahead.ranks.fault_report import fault_path
from runahead.ranks.ranks import Ranks

MOST_FOR_ALL_PAIRS = 8
"""Ranks up to which every pair is measured; of more, neighbours in the chain are."""

FIRST_BYTES, MOST_BYTES, MESSAGE_S = 1 << 16, 32 << 20, 0.1
"""Size of a link's first message, most bytes of the message whose rate counts, and its seconds."""

NEW_TOKENS = 48
"""Tokens that are decoded, for exactness and for the time per token: many more than come before a graph on a GPU."""

DRILL_ROUNDS = 1000
"""Prompts of a drill, which ends long before."""


@dataclass(frozen=True, kw_only=True)
class JobTask:
    """A job's work.

    Attributes:
        kind: key of `TASKS`.
        length: tokens of its prompt.
        out: file for the result of rank 0.
        signal: number of the signal that the last rank sends itself in a drill.
    """

    kind: str
    model: dict[str, Any]
    ranks: dict[str, Any]
    length: int
    out: str = ""
    signal: int = 0

    def job(self, name: str, num_ranks: int, *, limit_s: float, timeout_s: float) -> Job:
        """The job that does it."""
        return Job(
            name=name,
            module="benchmarks.doctor.tasks",
            args=[json.dumps(asdict(self))],
            num_ranks=num_ranks,
            limit_s=limit_s,
            last_words_s=timeout_s + 15,
        )


def plain(options: ModelOptions | RanksOptions) -> dict[str, Any]:
    """Fields of options for JSON."""
    return {name: getattr(value, "name", value) for name, value in vars(options).items()}


def probe(task: JobTask, ranks: Ranks) -> dict[str, Any]:
    """Measure links, memory, matrix products, exactness and decoding. Every rank calls this.

    What reads chosen blocks is asked last: a compiler that hangs, or leaves a GPU unusable, takes nothing of the rest,
    which rank 0 has written by then.
    """
    links = {f"{a}-{b}": _link(ranks, (a, b)) for a, b in pairs_of(ranks.size)}
    together = ranks.gather(ranks.on_all_ranks("memory", lambda: memory_Bps(ranks.device)), "memory")
    decodes = ranks.size - 1
    alone = ranks.on_all_ranks("memory", lambda: memory_Bps(ranks.device) if ranks.rank == decodes else 0.0)
    load = partial(Model.load, ModelOptions(**task.model), ranks.device, ranks_on_host=ranks.local_size)
    model = ranks.on_all_ranks("the model", load)
    matmul = ranks.gather(ranks.on_all_ranks("matrix products", lambda: matmul_rate(model)), "matrix products")
    names = [PrefillName.single] + [PrefillName.kv_runahead] * (ranks.size > 1)
    ids = random_ids(task.length, model.vocab_size)
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    decode, runs = DecodeOptions(name=DecodeName.last), {}
    for name in names:  # with the threads of which memory and matrix products were measured
        engine = Engine(model, ranks, prefill=PrefillOptions(name=name), decode=decode, lends=False)
        engine.generate([ids], GenerationOptions(max_new_tokens=2, ignore_eos=True))  # warm up
        batch = engine.generate([ids], options)
        generation = batch.generations[0]
        runs[name.name] = {
            "tokens": generation.new_token_ids,
            "top5": generation.first_token_logits_top5,
            "ttft_s": batch.ttft_s,
            "tpot_s": batch.tpot_s,
        }
    found: dict[str, Any] = {
        "links": links,
        "memory_Bps": together,
        "memory_alone_Bps": ranks.gather(alone, "memory")[decodes],
        "matmul_flops": matmul,
        "runs": runs,
        "length": task.length,
        "decoded_bytes": decoded_bytes(model, task.length),
        "kv_bytes_per_token": kv_bytes_per_token(model.kv_shapes),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": model.name,
        "layers": model.num_layers,
        "backend": ranks.backend,
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "shares": shares(model, ranks.size),
        "chosen_blocks": [],
    }
    if ranks.rank == 0:
        write_whole(Path(task.out), json.dumps(found))
    blocks = ranks.on_all_ranks("chosen blocks", lambda: chosen_blocks(model))
    return found | {"chosen_blocks": ranks.gather(blocks, "chosen blocks")}


def chosen_blocks(model: Model) -> dict[str, str] | None:
    """The reader of chosen blocks of keys in layers of this model (`prefill.attention=xattention`), compared where it
    is compiled, and why it is nothing faster; None if no layer attends."""
    if not model.kv_shapes:
        return None
    shape, num_tokens = model.kv_shapes[0], 2 * SPARSE_BLOCK
    q_BNCH, k_BKSH, v_BKSV = (
        torch.zeros(1, heads, num_tokens, dim, dtype=model.dtype, device=model.device)
        for heads, dim in (
            (model.num_query_heads, shape.key_dim),
            (shape.num_kv_heads, shape.key_dim),
            (shape.num_kv_heads, shape.value_dim),
        )
    )
    if fused_kernel(q_BNCH, k_BKSH, v_BKSV) is operators.attend:
        return {"by": "kernel", "why": ""}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        by = "flex" if flex.takes(q_BNCH, k_BKSH, v_BKSV) else "gathering"
    if model.device.type == "cpu" and KERNELS.in_use:
        numbers = f"{str(model.dtype).removeprefix('torch.')} and heads of {shape.key_dim}"
        why = f"our kernel takes float32 or bfloat16 and heads of a multiple of {NUMBERS} numbers, not {numbers}"
        return {"by": by, "why": why}
    return {"by": by, "why": " ".join(str(each.message).removeprefix(flex.GATHERED) for each in told)}


def shares(model: Model, num_ranks: int) -> list[int]:
    """Numbers of ranks up to `num_ranks` that tensor parallelism can share the model out to."""
    return [number for number in range(2, num_ranks + 1) if _can_share(model, number)]


def _can_share(model: Model, num_ranks: int) -> bool:
    try:
        check_shares(model.config, num_ranks)
    except ValueError:
        return False
    return True


def pairs_of(size: int) -> list[tuple[int, int]]:
    """Pairs of ranks whose link is measured."""
    if size > MOST_FOR_ALL_PAIRS:
        return list(pairwise(range(size)))
    return [(a, b) for a in range(size) for b in range(a + 1, size)]


def _link(ranks: Ranks, pair: tuple[int, int]) -> dict[str, float]:
    """Latency in seconds and bytes per second between two ranks, with messages that fit the link's speed."""
    first = _ping(ranks, pair, FIRST_BYTES)
    num_bytes = min(MOST_BYTES, max(FIRST_BYTES, int(first.bandwidth_Bps * MESSAGE_S)))
    link = _ping(ranks, pair, num_bytes)
    return {"latency_s": link.latency_s, "bandwidth_Bps": link.bandwidth_Bps}


def _ping(ranks: Ranks, pair: tuple[int, int], num_bytes: int) -> Link:
    link = ping(ranks, num_bytes=num_bytes, pair=pair)
    assert link is not None, "a single rank has no pairs"
    return link


def memory_Bps(device: torch.device) -> float:  # noqa: N802
    """Bytes per second that a device reads from its memory: the best of several sums over more than its caches hold."""
    num_bytes = (4 << 30) if device.type == "cuda" else (256 << 20)
    x = torch.ones(num_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(6):
        began_s = time.perf_counter()
        x.sum()
        if x.is_cuda:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return num_bytes / best_s


def decoded_bytes(model: Model, num_tokens: int) -> int:
    """Bytes that one decoding step reads: all weights but the rows of the input embedding, and the KV cache."""
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    embedding = model.module.get_input_embeddings().weight
    head = model.module.get_output_embeddings()
    if head is None or head.weight.data_ptr() != embedding.data_ptr():
        weights.pop(embedding.data_ptr())
    return sum(weights.values()) + num_tokens * kv_bytes_per_token(model.kv_shapes)


def drill(task: JobTask, ranks: Ranks) -> dict[str, Any]:
    """Generate until the last rank kills or stops itself in the middle of a prompt. Every rank calls this."""
    load = partial(Model.load, ModelOptions(**task.model), ranks.device, ranks_on_host=ranks.local_size)
    engine = Engine(ranks.on_all_ranks("the model", load), ranks)
    ids = random_ids(task.length, engine.model.vocab_size)
    once = GenerationOptions(max_new_tokens=1)
    engine.generate([ids], once)
    ttft_s = engine.generate([ids], once).ttft_s
    if ranks.rank == ranks.size - 1:
        threading.Timer(ttft_s / 2, _fault, [task.signal]).start()
    for _ in range(DRILL_ROUNDS):
        engine.generate([ids], once)
    return {}


def _fault(number: int) -> None:
    print(json.dumps({"fault_s": time.time()}), flush=True)
    os.kill(os.getpid(), number)


TASKS: dict[str, Callable[[JobTask, Ranks], dict[str, Any]]] = {"probe": probe, "drill": drill}


def as_rank(
    options: RanksOptions,
    work: Callable[[Ranks], object],
    *,
    fault_file: Path | None = None,
    may_share_gpus: bool = False,
) -> None:
    """Join the job that this process was started for, and work as a rank of it. The process ends if that fails."""
    ranks: Ranks | None = None

    def end(error: BaseException) -> None:
        end_with(error, ranks, fault_file)

    with ending_signals(end):
        try:
            ranks = Ranks.before_joining(options)
            ranks.when_stuck(end)
            ranks.join(num_shares=options.tensor, may_share_gpus=may_share_gpus)
            work(ranks)
            ranks.close()
        except BaseException as error:
            end(error)


def main() -> None:
    """Do the task on this rank."""
    follow_launcher()
    task = JobTask(**json.loads(sys.argv[1]))

    def work(ranks: Ranks) -> None:
        result = TASKS[task.kind](task, ranks)
        if ranks.rank == 0:
            write_whole(Path(task.out), json.dumps(result))

    fault_file = fault_path(task.out, int(os.environ["RANK"])) if task.signal else None
    as_rank(RanksOptions(**task.ranks), work, fault_file=fault_file)


DRILLS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""Faults of the drills, by what becomes of the rank."""

if __name__ == "__main__":
    main()
