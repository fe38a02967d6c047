"""What a lookup table is worth on two live ranks: KVR-S, and KVR-P without the entry, against KVR-E and one rank.

    torchrun --nproc-per-node=2 -m benchmarks.studies.split_quality --table tables/smollm2-cpu-2.json --lengths 4096

Measures the compute of one rank first and says how much faster than even chunks it lets any split be, then runs all
variants in turn (A B C A B C). Appends a JSON line per length to benchmarks/results/split_quality.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings

import torch
from tqdm import tqdm

from benchmarks.harness.machine import ROOT
from partitioner.measure import LiveCost, probe_compute
from partitioner.searches.planning import practical_bound
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.lookup_table import LookupTable, TableWarning
from runahead import Model, ModelOptions, PrefillOptions, Ranks, RanksOptions, even
from runahead.context import ContextPartition

PROBES = [256, 512, 1024, 2048, 4096]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default=str(ROOT / "tables" / "smollm2-cpu-2.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="lengths with entries")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each variant")
    options = parser.parse_args()

    table = LookupTable.load(options.table)
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        compute = ranks.broadcast(probe_compute(model, chunks=PROBES, prefixes=PROBES), 0, "the compute cost")
        cluster = Cluster(
            compute=compute,
            speed=[1.0] * ranks.size,
            links=None,
            kv_bytes_per_token=model.kv_shapes[0].bytes_per_token(),
        )
        for length in options.lengths:
            even_s = simulate(even(length, ranks.size), cluster).ttft_s
            allowed = even_s / practical_bound(length, ranks.size, cluster, min_stride=64).cost_s
            if ranks.rank == 0:
                print(f"{length} tokens: compute allows any split to be {allowed:.3f} times as fast as even chunks")
            splits = _splits(table, length, ranks.size)
            live = LiveCost(model, ranks, PrefillOptions(), length)
            live.run(splits["KVR-E"])  # warm up
            seconds: dict[str, list[float]] = {name: [] for name in splits}
            for _ in tqdm(range(options.pairs), disable=ranks.rank != 0, unit="pair"):
                for name, split in splits.items():
                    seconds[name].append(live.run(split))
            if ranks.rank == 0:
                _report(length, splits, seconds, allowed)


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


def _report(length: int, splits: dict[str, ContextPartition], seconds: dict[str, list[float]], allowed: float) -> None:
    for name, runs in seconds.items():
        line = f"  {name:8} {splits[name].chunk_lengths}: median {statistics.median(runs):.2f} s"
        for other in ("one rank", "KVR-E", "KVR-S"):
            if other != name:
                ratios = [b / a for a, b in zip(runs, seconds[other], strict=True)]
                line += f", {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) x {other}"
        print(line)
    record = {
        "length": length,
        "boundaries": {name: split.boundaries for name, split in splits.items()},
        "seconds": seconds,
        "allowed_over_even": allowed,
        "torch": torch.__version__,
    }
    with (ROOT / "benchmarks" / "results" / "split_quality.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
