"""KVR-P against KVR-S by simulation: the loss in TTFT at prompt lengths that are not in a lookup table.

    python -m benchmarks.studies.interpolation --ranks 2 4 8 --gbps 800 100 25 10

Plans a 7B model (Llama 7B, and the same with 8 KV heads) with tables of several spacings, as
`python -m partitioner.search search.objective=modelled` does, with lengths added (its default) and with none. Then
looks up a length at the geometric mean of any two neighbours in a table and one at three quarters of the way, and
compares TTFT with that of a search at that length, seeded by the lookup among others. Prints the largest and the median
loss and writes a JSON line per table to benchmarks/results/interpolation.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from statistics import median

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
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


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per table, as given and with lengths added."""
    options = run.options
    cases = list(product(options.spacings, options.heads, options.gbps, options.ranks))
    for spacing, heads, gbps, ranks in run.bar(cases, "table"):
        cluster = _cluster(heads, gbps, ranks, options.step_us * 1e-6)
        for max_loss in (None, SearchOptions().max_loss):
            line = {"spacing": spacing, "heads": heads, "gbps": gbps, "ranks": ranks, "max_loss": max_loss}
            line |= {"step_us": options.step_us}
            if not run.has(line):
                yield line | _losses(cluster, SPACINGS[spacing], max_loss)


def table(found: list[Line]) -> str:
    """Rows of all tables, and the largest and the median loss of those with lengths added."""
    rows: Rows = [("table", "lengths", "largest loss", "median")]
    for line in found:
        losses, added = line["losses"].values(), "as given" if line["max_loss"] is None else "lengths added"
        name = f"{line['heads']} {line['gbps']:5g} Gbit/s {line['ranks']} ranks, {line['spacing']:10} {added}"
        rows.append((name, str(line["lengths"]), f"{max(losses):.2%}", f"{median(losses):.2%}"))
    worst = [max(line["losses"].values()) for line in found if line["max_loss"] is not None]
    summary = f"largest loss {max(worst):.2%}, median {median(worst):.2%}" if worst else "none"
    return f"{text_table(rows)}with lengths added, over {len(worst)} tables: {summary}"


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


def _losses(cluster: Cluster, lengths: list[int], max_loss: float | None) -> Line:
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


STUDY = Study(
    name="interpolation",
    text=__doc__,
    has="losses",
    measure=measure,
    table=table,
    options={
        "ranks": option([2, 4, 8]),
        "heads": option(list(KV_HEADS), choices=KV_HEADS),
        "gbps": option([800.0, 100.0, 25.0, 10.0], "1e9 bits per second"),
        "spacings": option(list(SPACINGS), choices=SPACINGS),
        "step-us": option(20.0, "fixed overhead of a step of compute"),
    },
    key=("spacing", "heads", "gbps", "ranks", "max_loss", "step_us", "code"),
)

if __name__ == "__main__":
    STUDY.main()
