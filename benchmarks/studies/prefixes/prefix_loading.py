"""Time to first token of a prompt whose prefix is on the device, in host memory or on disk, or is computed.

    python -m benchmarks.studies.prefixes.prefix_loading --lengths 1000 4000 8000
    python -m benchmarks.studies.prefixes.prefix_loading --draw-only

Variants run in turn, on the same prompts of random tokens, each a prefix and some new tokens:

    device            the prefix is there: the bound
    host              it is brought from host memory layer by layer, while the layers before compute
    host, whole first the forward waits for all layers
    host, 4 bits      it is there in 4 bits, and each layer is dequantised on the device
    disk              its file is read, checked and brought layer by layer, too (page cache warm)
    disk, 4 bits      its file is in 4 bits
    none              nothing is stored: the whole prompt is computed

TTFT is the time of a call for one token, with the look-up of the prefix. Appends a JSON line per length to
benchmarks/results/prefix_loading.jsonl.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from statistics import median

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks, RanksOptions
from runahead.cache.quantised.records import KVRecords
from runahead.config import ModelName
from runahead.ranks.accelerator import accelerator_for
from runahead.reuse.prefix_tree import PrefixHit, PrefixTree

ONE = GenerationOptions(max_new_tokens=1, ignore_eos=True)
VARIANTS = ("device", "host", "host, whole first", "host, 4 bits", "disk", "disk, 4 bits", "none")


class WholeFirst(PrefixTree):
    """A tree that gives a prefix once all of its layers are on the device."""

    def match(self, ids: Sequence[int], key: str) -> PrefixHit:
        hit = super().match(ids, key)
        for node in hit.nodes:
            list(node.layers_TKX)
        for copies in self._opened.values():
            if (accelerator := accelerator_for(copies.device)) is not None:
                accelerator.synchronize()
        return hit


def push_down(tree: PrefixTree) -> None:
    """Let all that is on the device go to the next tier."""
    limit, tree.limit_bytes = tree.limit_bytes, 0
    tree.make_room()
    tree.settle()
    tree.limit_bytes = limit


def ttfts(run: Run, model: Model, ranks: Ranks, length: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each round, by variant."""
    draw = random.Random(length)
    prefix, new = ([draw.randrange(model.vocab_size) for _ in range(num)] for num in (length, run.options.new))
    trees: dict[str, PrefixTree] = {
        "device": PrefixTree(inf),
        "host": PrefixTree(inf, host_bytes=inf),
        "host, whole first": WholeFirst(inf, host_bytes=inf),
        "host, 4 bits": PrefixTree(inf, host_bytes=inf, bits=4),
        "disk": PrefixTree(inf, folder=f"{folder}/{length}"),
        "disk, 4 bits": PrefixTree(inf, folder=f"{folder}/{length} in 4 bits", bits=4),
    }
    engines = {name: Engine(model, ranks, tree=tree) for name, tree in trees.items()}
    for engine in engines.values():
        engine.generate([prefix], ONE)

    def turn(name: str, number: int) -> float:
        # Another token after the prefix in every round, since what was computed in the one before is stored, too.
        prompt, tree = [*prefix, number % model.vocab_size, *new], trees.get(name)
        engine = engines[name] if tree is not None else Engine(model, ranks)
        if tree is not None and name != "device":
            push_down(tree)
        began_s = time.perf_counter()
        batch = engine.generate([prompt], ONE)
        taken_s = time.perf_counter() - began_s
        reuse = batch.ranks[0].reuse
        assert (0 if reuse is None else reuse.cached_tokens) == (0 if tree is None else length)
        return taken_s

    return run.in_turn({name: partial(turn, name) for name in VARIANTS}, run.options.rounds, warmup=1)


def measure(run: Run) -> Iterator[Line]:
    """A line per length of the prefix."""
    options = run.options
    with Ranks.start(RanksOptions(threads=options.threads)) as ranks, tempfile.TemporaryDirectory() as folder:
        given = ModelOptions(name=ModelName.hf, path=options.path) if options.path else ModelOptions()
        model = Model.load(given, ranks.device)
        for length in options.lengths:
            yield {
                "length": length,
                "new": options.new,
                "model": model.name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": ranks.device.type,
                "threads": options.threads,
                "prefix_bytes": length * sum(shape.bytes_per_token() for shape in model.kv_shapes),
                "few_bits_bytes": length
                * sum(shape.bytes_per_token() for shape in KVRecords(model.kv_shapes, 4).shapes),
                "ttft_s": ttfts(run, model, ranks, length, folder),
            }


def table(found: list[Line]) -> str:
    """Median TTFT of the last run by length, and its spread."""
    rows: Rows = [("prefix", "MB", "in 4 bits", *VARIANTS)]
    for line in last_run(found):
        times = [line["ttft_s"].get(name) for name in VARIANTS]
        told = [f"{median(each):.3f} s ({min(each):.3f} to {max(each):.3f})" if each else "" for each in times]
        sizes = [f"{line[name] / 1e6:,.0f}" if name in line else "" for name in ("prefix_bytes", "few_bits_bytes")]
        rows.append((f"{line['length']:,}", *sizes, *told))
    return text_table(rows)


STUDY = Study(
    name="prefixes.prefix_loading",
    text=__doc__,
    has="ttft_s",
    measure=measure,
    table=table,
    options={
        "lengths": option([1000, 2000, 4000, 8000], "tokens of the prefix"),
        "new": option(64, "tokens after it"),
        "rounds": option(7),
        "threads": option(None, "of the process", type=int),
        "path": option(None, "a checkpoint's folder; by default the model of the demo"),
    },
)

if __name__ == "__main__":
    STUDY.main()
