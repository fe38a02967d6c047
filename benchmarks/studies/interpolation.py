"""KVR-P against KVR-S by simulation: what do lengths that were left out of a table lose?

    python -m benchmarks.studies.interpolation --ranks 2 4 8 --gbps 800 100 25 10

Plans a 7B model (Llama 7B, and the same with 8 K,V heads) with tables of several spacings, as
`python -m partitioner.search search.objective=modelled` does, with lengths added (its default) and with none. Then
looks up a length in the geometric middle between any two of a table's and one at three quarters of the way, and
compares TTFT with that of a search at that length, seeded by the lookup among others. Prints the largest and the median
loss and writes a JSON line per table to benchmarks/results/interpolation.jsonl.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise, product
from statistics import median

from tqdm import tqdm

from benchmarks.harness.machine import ROOT
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link, Links
from partitioner.options import Objective, SearchOptions
from partitioner.searches.planning import best_split, simulated_cost
from partitioner.searches.progress import SearchProgress
from partitioner.searches.simulated import SimulatedSearch
from partitioner.simulation.cluster import Cluster
from partitioner.table.fingerprint import Fingerprint, ModelShape
from partitioner.table.lookup_table import LookupTable

KV_HEADS = {"MHA": 32, "GQA": 8}
SPACINGS = {
    "doubling": [1024 * 2**i for i in range(7)],
    "four times": [1024, 4096, 16384, 65536],
    "4k": [4096, 8192, 12288, 16384, 20480, 24576],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", nargs="+", choices=KV_HEADS, default=list(KV_HEADS))
    parser.add_argument("--gbps", type=float, nargs="+", default=[800, 100, 25, 10], help="1e9 bits per second")
    parser.add_argument("--spacings", nargs="+", choices=SPACINGS, default=list(SPACINGS))
    parser.add_argument("--step-us", type=float, default=20, help="fixed overhead of a step of compute")
    options = parser.parse_args()

    cases = list(product(options.spacings, options.heads, options.gbps, options.ranks))
    out = ROOT / "benchmarks" / "results" / "interpolation.jsonl"
    worst: list[float] = []
    with out.open("a") as file:
        for spacing, heads, gbps, ranks in tqdm(cases, unit="table", disable=None):
            cluster = _cluster(heads, gbps, ranks, options.step_us * 1e-6)
            for max_loss in (None, SearchOptions().max_loss):
                record = {"spacing": spacing, "heads": heads, "gbps": gbps, "ranks": ranks, "max_loss": max_loss}
                record |= _losses(cluster, SPACINGS[spacing], max_loss)
                losses = record["losses"].values()
                tqdm.write(
                    f"{heads} {gbps:5g} Gbit/s {ranks} ranks, {spacing:10} "
                    f"{'as given' if max_loss is None else 'lengths added':13} {record['lengths']:3} lengths: "
                    f"largest loss {max(losses):6.2%}, median {median(losses):6.2%}"
                )
                file.write(json.dumps(record | {"step_us": options.step_us}) + "\n")
                if max_loss is not None:
                    worst.append(max(losses))
    print(f"with lengths added, over {len(worst)} tables: largest loss {max(worst):.2%}, median {median(worst):.2%}")


def _cluster(heads: str, gbps: float, ranks: int, step_s: float) -> Cluster:
    kv_dim = KV_HEADS[heads] * 128
    compute = FittedCost.from_shape(
        num_layers=32,
        model_dim=4096,
        kv_dim=kv_dim,
        mlp_dim=11008,
        vocab_size=32000,
        matmul_flops=200e12,
        attention_flops=120e12,
        step_s=step_s,
    )
    return Cluster(
        compute=compute,
        speed=[1.0] * ranks,
        links=Links(ranks, Link.from_gbps(gbps, latency_s=10e-6)),
        kv_bytes_per_token=2 * 2 * kv_dim,
    )


def _losses(cluster: Cluster, lengths: list[int], max_loss: float | None) -> dict[str, object]:
    shape = ModelShape(
        type="llama", num_layers=32, model_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, vocab_size=32000
    )
    about = Fingerprint(
        model=shape, dtype="float16", device="modelled", threads=None, backend="nccl", transfer=cluster.transfer.name
    )
    ranks, cost = cluster.num_ranks, simulated_cost(cluster)
    options = SearchOptions(objective=Objective.modelled, max_loss=max_loss)
    progress = SearchProgress([], options, shown=False)
    search = SimulatedSearch(LookupTable(about, []), {ranks: cluster}, options, progress)
    for _ in search.run(lengths):
        pass
    table = search.table
    known = {entry.length for entry in table.entries}
    losses = {}
    for shorter, longer in pairwise(lengths):
        for length in (round((shorter * longer) ** 0.5), (shorter + 3 * longer) // 4):
            while length in known:  # added; the next left out is halfway to the next, if any is between
                longer_known = min(each for each in known if each > length)
                length = (length + longer_known) // 2 if longer_known > length + 1 else longer_known
            split = table.lookup(length, ranks)
            stride = options.stride(length, ranks)
            searched = [
                best_split(length, ranks, cluster, min_stride=stride, seeds=seeds).cost_s for seeds in ([], [split])
            ]
            losses[length] = cost(split) / min(searched) - 1
    return {"losses": losses, "lengths": len(known)}


if __name__ == "__main__":
    main()
