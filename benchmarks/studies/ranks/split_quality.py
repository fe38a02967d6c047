"""Gain of a lookup table on two live ranks: KVR-S, and KVR-P without the entry, against KVR-E and one rank.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.split_quality --table tables/smollm2-cpu-2.json

Measures the compute of one rank first and prints the largest speed-up over even chunks that any split can reach, then
runs all variants in turn (A B C A B C). Appends a JSON line per length to benchmarks/results/split_quality.jsonl.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Run, Study, newest, option
from partitioner.measure import LiveCost, probe_compute
from partitioner.searches.planning import practical_bound
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.lookup_table import LookupTable, TableWarning
from runahead import Model, ModelOptions, PrefillOptions, Ranks, RanksOptions, even
from runahead.context import ContextPartition

PROBES = [256, 512, 1024, 2048, 4096]


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length."""
    lookup_table = LookupTable.load(run.options.table)
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        compute = ranks.broadcast(probe_compute(model, chunks=PROBES, prefixes=PROBES), 0, "the compute cost")
        cluster = Cluster(
            compute=compute,
            speed=[1.0] * ranks.size,
            links=None,
            kv_bytes_per_token=model.kv_shapes[0].bytes_per_token(),
        )
        for length in run.options.lengths:
            even_s = simulate(even(length, ranks.size), cluster).ttft_s
            allowed = even_s / practical_bound(length, ranks.size, cluster, min_stride=64).cost_s
            if ranks.rank == 0:
                print(_bound_text(length, allowed))
            splits = _splits(lookup_table, length, ranks.size)
            live = LiveCost(model, ranks, PrefillOptions(), length)
            live.run(splits["KVR-E"])  # warm up
            turns = {name: _turn(live, split) for name, split in splits.items()}
            yield {
                "length": length,
                "boundaries": {name: split.boundaries for name, split in splits.items()},
                "seconds": run.in_turn(turns, run.options.pairs),
                "allowed_over_even": allowed,
                "torch": torch.__version__,
            }


def _turn(live: LiveCost, split: ContextPartition) -> Callable[[int], float]:
    return lambda _: live.run(split)


def _bound_text(length: int, allowed: float) -> str:
    return f"{length} tokens: compute allows any split to be {allowed:.3f} times as fast as even chunks"


def _splits(table: LookupTable, length: int, num_ranks: int) -> dict[str, ContextPartition]:
    splits = {
        "one rank": ContextPartition(boundaries=(0,) * num_ranks + (length,)),
        "KVR-E": even(length, num_ranks),
        "KVR-S": table.lookup(length, num_ranks),
    }
    others = LookupTable(table.fingerprint, [entry for entry in table.entries if entry.length != length])
    lengths = [entry.length for entry in others.entries_for(num_ranks)]
    if min(lengths) < length < max(lengths):
        with warnings.catch_warnings():
            warnings.simplefilter("error", TableWarning)
            splits["KVR-P"] = others.lookup(length, num_ranks)
    return splits


def table(found: list[Line]) -> str:
    """Medians and pairwise ratios of each length's last measurement."""
    told = []
    for line in newest(found, "length").values():
        told.append(_bound_text(line["length"], line["allowed_over_even"]))
        for name, runs in line["seconds"].items():
            chunks = tuple(b - a for a, b in pairwise(line["boundaries"][name]))
            row = f"  {name:8} {chunks}: median {median(runs):.2f} s"
            for other in ("one rank", "KVR-E", "KVR-S"):
                if other != name:
                    ratios = [b / a for a, b in zip(runs, line["seconds"][other], strict=True)]
                    row += f", {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) x {other}"
            told.append(row)
    return "\n".join(told)


STUDY = Study(
    name="ranks.split_quality",
    text=__doc__,
    has="allowed_over_even",
    measure=measure,
    table=table,
    options={
        "table": option(str(ROOT / "tables" / "smollm2-cpu-2.json")),
        "lengths": option([2048, 4096], "lengths with entries"),
        "pairs": option(5, "runs of each variant"),
    },
)

if __name__ == "__main__":
    STUDY.main()
