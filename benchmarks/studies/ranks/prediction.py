"""Simulated against measured TTFT of two live ranks, with the simulation based on one device's compute.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.prediction --lengths 1024 4096 --ratios 0.5 0.6 0.7

Measures compute and runs every split, in turn, round after round, so that drift of the machine's speed affects all
alike; then predicts every split from the medians. Appends a JSON line per point to benchmarks/results/prediction.jsonl
and draws docs/studies/prediction.png.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from partitioner.cost.link import Links
from partitioner.cost.measured import MeasuredCost
from partitioner.measure import LiveCost, ping, probe_compute
from partitioner.pictures.table_pictures import agreement_png
from partitioner.simulation.chain import Cluster, simulate
from runahead import ContextPartition, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions, from_ratios

PROBES = [256, 512, 1024, 2048, 4096]


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and split."""
    options = run.options
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        link = ping(ranks)
        assert link is not None
        live = {length: LiveCost(model, ranks, PrefillOptions(), length) for length in options.lengths}
        splits = [from_ratios([x, 1 - x])(length, ranks.size) for length in options.lengths for x in options.ratios]
        for length in options.lengths:
            live[length].run(from_ratios([options.ratios[0], 1 - options.ratios[0]])(length, ranks.size))  # warm up
        probes: list[MeasuredCost] = []

        def probe(_: int) -> float:
            probed = probe_compute(model, chunks=PROBES, prefixes=PROBES, repeats=1)
            probes.append(ranks.broadcast(probed, 0, "the compute cost"))
            return 0.0

        def turn(split: ContextPartition) -> Callable[[int], float]:
            return lambda _: live[split.num_tokens].run(split)

        seconds = run.in_turn({"probe": probe, **{repr(split): turn(split) for split in splits}}, options.repeats)
        cluster = Cluster(
            compute=medians(probes),
            speed=[1.0] * ranks.size,
            links=Links(ranks.size, link),
            kv_bytes_per_token=model.kv_shapes[0].bytes_per_token(),
        )
        for split in splits:
            predicted_s, measured_s = simulate(split, cluster).ttft_s, seconds[repr(split)]
            yield {
                "length": split.num_tokens,
                "boundaries": split.boundaries,
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "error": predicted_s / median(measured_s) - 1,
                "torch": torch.__version__,
            }
        if ranks.rank == 0:
            print(f"link: {link.latency_s * 1e6:.0f} us, {link.bandwidth_Bps / 1e9:.2f} GB/s")


def medians(costs: list[MeasuredCost]) -> MeasuredCost:
    """Cost of the medians over measurements, point by point."""
    points = {
        name: {at: median(getattr(cost, name)[at] for cost in costs) for at in getattr(costs[0], name)}
        for name in ("first_s", "between_s", "own_s", "last_s", "prefix_s")
    }
    return MeasuredCost(num_layers=costs[0].num_layers, **points)


def table(found: list[Line]) -> str:
    """Rows of the last run's splits, and the largest and the median error."""
    rows: Rows = [("tokens", "boundary", "predicted", "measured", "error")]
    for line in last_run(found):
        times = f"{line['predicted_s']:.2f} s", f"{median(line['measured_s']):.2f} s"
        rows.append((str(line["length"]), str(line["boundaries"][1]), *times, f"{line['error']:+.1%}"))
    errors = sorted(abs(line["error"]) for line in last_run(found))
    return f"{text_table(rows)}largest error {errors[-1]:.1%}, median {median(errors):.1%}, n={len(errors)}"


def picture(found: list[Line]) -> bytes:
    """Draw predicted over measured TTFT, for the last run."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in last_run(found):
        pair = median(line["measured_s"]), line["predicted_s"]
        points.setdefault(f"{line['length']:,} tokens", []).append(pair)
    return agreement_png(points, "SmolLM2-135M-Instruct, two ranks of one thread")


STUDY = Study(
    name="ranks.prediction",
    text=__doc__,
    has="predicted_s",
    measure=measure,
    table=table,
    options={
        "lengths": option([1024, 2048, 4096]),
        "ratios": option([0.5, 0.55, 0.6, 0.65, 0.7], "shares of the first rank"),
        "repeats": option(3),
    },
    pictures={"prediction.png": picture},
)

if __name__ == "__main__":
    STUDY.main()
