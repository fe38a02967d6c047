"""Replayed against measured TTFT: does a simulation from one device's compute predict two live ranks?

    torchrun --nproc-per-node=2 -m benchmarks.studies.prediction --lengths 1024 2048 4096 --ratios 0.5 0.55 0.6 0.65 0.7

Measures compute and runs every split, in turn, round after round, so that a machine whose speed drifts does not decide;
then predicts every split from the medians. Appends a JSON line per point to benchmarks/results/prediction.jsonl and
draws docs/prediction.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness.machine import ROOT
from partitioner.cost.link import Links
from partitioner.cost.measured import MeasuredCost
from partitioner.measure import LiveCost, ping, probe_compute
from partitioner.simulation.chain import Cluster, simulate
from runahead import ContextPartition, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions, from_ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.55, 0.6, 0.65, 0.7])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", default=str(ROOT / "docs" / "prediction.png"))
    options = parser.parse_args()

    with Ranks.start(RanksOptions(threads=1)) as ranks:
        model = Model.load(ModelOptions(), ranks.device, ranks_on_host=ranks.local_size)
        chunks, prefixes = [256, 512, 1024, 2048, 4096], [256, 512, 1024, 2048, 4096]
        link = ping(ranks)
        assert link is not None
        live = {length: LiveCost(model, ranks, PrefillOptions(), length) for length in options.lengths}
        splits = {
            length: [from_ratios([ratio, 1 - ratio])(length, ranks.size) for ratio in options.ratios]
            for length in options.lengths
        }
        probes: list[MeasuredCost] = []
        runs: dict[tuple[int, ContextPartition], list[float]] = {
            (length, split): [] for length in options.lengths for split in splits[length]
        }
        for length in options.lengths:
            live[length].run(splits[length][0])  # warm up
        for _ in tqdm(range(options.repeats), disable=ranks.rank != 0):
            probed = probe_compute(model, chunks=chunks, prefixes=prefixes, repeats=1)
            probes.append(ranks.broadcast(probed, 0, "the compute cost"))
            for length, split in runs:
                runs[length, split].append(live[length].run(split))
        cluster = Cluster(
            compute=medians(probes),
            speed=[1.0] * ranks.size,
            links=Links(ranks.size, link),
            kv_bytes_per_token=model.kv_shapes[0].bytes_per_token(),
        )
        lines = []
        for (length, split), measured_s in runs.items():
            predicted_s = simulate(split, cluster).ttft_s
            lines.append(
                {
                    "length": length,
                    "boundaries": split.boundaries,
                    "predicted_s": predicted_s,
                    "measured_s": measured_s,
                    "error": predicted_s / statistics.median(measured_s) - 1,
                }
            )
        if ranks.rank == 0:
            report(lines, options.picture)
            print(f"link: {link.latency_s * 1e6:.0f} us, {link.bandwidth_Bps / 1e9:.2f} GB/s")


def medians(costs: list[MeasuredCost]) -> MeasuredCost:
    """Point by point."""
    points = {
        name: {at: statistics.median(getattr(cost, name)[at] for cost in costs) for at in getattr(costs[0], name)}
        for name in ("first_s", "between_s", "own_s", "last_s", "prefix_s")
    }
    return MeasuredCost(num_layers=costs[0].num_layers, **points)


def report(lines: list[dict[str, Any]], picture: str) -> None:
    """Print the points, append them, and draw them."""
    from partitioner.pictures.table_pictures import agreement_png

    with (ROOT / "benchmarks" / "results" / "prediction.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({**line, "torch": torch.__version__}) + "\n")
            measured_s = statistics.median(line["measured_s"])
            print(
                f"{line['length']:>6} tokens, boundary {line['boundaries'][1]:>5}: predicted "
                f"{line['predicted_s']:.2f} s, measured {measured_s:.2f} s, error {line['error']:+.1%}"
            )
    errors = sorted(abs(line["error"]) for line in lines)
    print(f"largest error {errors[-1]:.1%}, median {statistics.median(errors):.1%}, n={len(errors)}")
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        pair = statistics.median(line["measured_s"]), line["predicted_s"]
        points.setdefault(f"{line['length']:,} tokens", []).append(pair)
    Path(picture).write_bytes(agreement_png(points, "SmolLM2-135M-Instruct, two ranks of one thread"))


if __name__ == "__main__":
    main()
