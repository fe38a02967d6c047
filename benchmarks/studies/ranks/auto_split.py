"""Is partition=auto as fast as the best split, and is a wrong split mended in three prompts? On two live ranks.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.auto_split --lengths 1024 2048 4096 8000

Three situations, each from nothing learned: `ready` (the first guess), `wrong` (the first split is wrong by a tenth of
the prompt) and `slowed` (after three prompts a busy loop at nice 3 starts on the core of one rank). Ranks are pinned to
a core each. After three prompts partition=auto, which goes on learning, runs in turn with fixed splits around its own,
the best of which counts as the searched one, and if ready with its first guess and zigzag (A B C A B C ...). Appends a
JSON line per situation and length to benchmarks/results/auto_split.jsonl.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option, times_as_fast
from partitioner.auto.balance import Balance
from partitioner.auto.partition import AutoPartition
from partitioner.auto.slowness import Slowness
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions
from runahead.config import PrefillName
from runahead.context import ContextPartition, Partitioner

SITUATIONS = ("ready", "wrong", "slowed")
PROMPTS = 3
"""Prompts within which a wrong split is to be mended."""
WRONG_BY = 0.1
"""Share of the prompt by which the first chunk is too short in the situation `wrong`."""
AUTO = "auto"


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per situation and length."""
    pin_to_a_core()
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        if ranks.size != 2:
            raise ValueError(f"{ranks.size} ranks were started; use torchrun --nproc-per-node=2")
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        for length in run.options.lengths:
            for situation in run.options.situations:
                yield {"situation": situation, "length": length} | Measurement(model, ranks, length).of(situation, run)


class Measurement:
    """Prompts of one length on live ranks. Every rank makes the same calls."""

    def __init__(self, model: Model, ranks: Ranks, length: int) -> None:
        self._model, self._ranks, self._length = model, ranks, length
        generator = torch.Generator().manual_seed(length)
        self._ids = torch.randint(model.vocab_size, (length,), generator=generator).tolist()

    def of(self, situation: str, run: Run) -> Line:
        """The figures of one situation, for a line."""
        with tempfile.TemporaryDirectory() as folder:
            auto = AutoPartition.start(self._model, self._ranks, folder=folder, tell=lambda sentence: None)
            first = auto(self._length, self._ranks.size)
            if situation == "wrong" and auto.balance is not None:
                spoil(auto.balance, self._length)
            engine = Engine(self._model, self._ranks, partition=auto)
            learning = [self._prompt(engine) for _ in range(PROMPTS)]
            with busy_loop(on=situation == "slowed" and self._ranks.rank == run.options.slowed_rank):
                if situation == "slowed":
                    learning += [self._prompt(engine) for _ in range(PROMPTS)]
                centre = auto(self._length, self._ranks.size).boundaries[1]
                splits = {
                    f"{offset:+g}": self._split(centre + round(offset * self._length)) for offset in run.options.offsets
                }
                turns: dict[str, Callable[[int], float]] = {AUTO: self._turn(engine)}
                if situation == "ready":
                    splits["first guess"] = first
                    turns["zigzag"] = self._turn(self._engine(None, PrefillName.zigzag))
                turns |= {name: self._turn(self._engine(split)) for name, split in splits.items()}
                seconds = run.in_turn(turns, run.options.pairs)
            return {
                "learning": learning,
                "centre": centre,
                "boundaries": {name: split.boundaries for name, split in splits.items()},
                "seconds": seconds,
                "torch": torch.__version__,
            }

    def _prompt(self, engine: Engine) -> Line:
        batch = engine.generate([self._ids], GenerationOptions(max_new_tokens=1))
        ranks = [{"compute_s": rank.prefill_s - rank.wait_s, "wait_s": rank.wait_s} for rank in batch.ranks]
        return {"ttft_s": batch.ttft_s, "boundaries": batch.boundaries, "ranks": ranks}

    def _turn(self, engine: Engine) -> Callable[[int], float]:
        return lambda _: float(self._prompt(engine)["ttft_s"])

    def _engine(self, split: ContextPartition | None, prefill: PrefillName = PrefillName.kv_runahead) -> Engine:
        def partition(num_tokens: int, num_ranks: int) -> ContextPartition:
            assert split is not None
            return split

        chosen: Partitioner = partition
        return Engine(self._model, self._ranks, prefill=PrefillOptions(name=prefill), partition=chosen)

    def _split(self, boundary: int) -> ContextPartition:
        return ContextPartition(boundaries=(0, max(1, min(boundary, self._length - 1)), self._length))


def spoil(balance: Balance, length: int) -> None:
    """Make a balance take the first rank for so slow that its chunk is too short by `WRONG_BY` of the prompt."""
    right, (start, *others) = balance.split(length).boundaries[1], balance.slowness.start
    while right - balance.split(length).boundaries[1] < WRONG_BY * length:
        start += 0.01
        balance.slowness = Slowness([start, *others])


def pin_to_a_core() -> None:
    """Keep this rank on a core of its own, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})


@contextmanager
def busy_loop(*, on: bool) -> Iterator[None]:
    """A process that computes at nice 3 on the cores of this one."""
    if not on:
        yield
        return
    loop = subprocess.Popen([sys.executable, "-c", "import os\nos.nice(3)\nwhile True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def table(found: list[Line]) -> str:
    """Speed of partition=auto relative to the best of the fixed splits, and how the split was learned."""
    told = []
    for line in newest(found, "situation", "length").values():
        seconds, length = line["seconds"], line["length"]
        fixed = {name: runs for name, runs in seconds.items() if name in line["boundaries"]}
        best = min(fixed, key=lambda name: median(fixed[name]))
        shares = [prompt["boundaries"][1] / length for prompt in line["learning"]]
        told.append(
            f"{line['situation']}, {length} tokens: first chunk {', '.join(f'{share:.3f}' for share in shares)}, "
            f"then {line['centre'] / length:.3f}; best fixed {line['boundaries'][best][1] / length:.3f} ({best})"
        )
        for name in dict.fromkeys([best, *(each for each in ("first guess", "zigzag") if each in seconds)]):
            told.append(
                f"  auto {median(seconds[AUTO]):.3f} s, {times_as_fast(seconds[AUTO], seconds[name], name)}, "
                f"{median(seconds[name]):.3f} s; n = {len(seconds[AUTO])}"
            )
    return "\n".join(told)


STUDY = Study(
    name="ranks.auto_split",
    text=__doc__,
    has="learning",
    measure=measure,
    table=table,
    options={
        "lengths": option([1024, 2048, 4096, 8000], "prompt lengths in tokens"),
        "situations": option(list(SITUATIONS), "situations to measure", choices=SITUATIONS),
        "offsets": option([-0.06, -0.03, -0.015, 0.015, 0.03, 0.06], "of the fixed splits, in shares of the prompt"),
        "pairs": option(9, "runs of each variant"),
        "slowed_rank": option(0, "rank on whose core the busy loop runs"),
    },
)

if __name__ == "__main__":
    STUDY.main()
