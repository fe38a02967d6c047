"""Predicted against measured ratios of two live ranks: shares of one stage, and stages of one share, over one rank.

    torchrun --nproc-per-node=2 -m benchmarks.studies.ranks.mesh_prediction --tokens 512 1024 2048 --rounds 3

Measures the compute of one device and an all-reduce, predicts TTFT and time per token by the planner's formulas, and
runs one rank, a chain of two with even chunks and two shares in turn. Appends a JSON line per length to
benchmarks/results/mesh_prediction.jsonl. The model has random weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, log2
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from partitioner.cost.collectives import allreduce_s, allreduce_sent_bytes
from partitioner.cost.link import Link, Links
from partitioner.cost.stage import ALLREDUCES
from partitioner.measure import ping, probe_compute
from partitioner.meshes.machine import Device, Machine
from partitioner.meshes.model_size import ModelSize
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions, even
from runahead.config import Device as Kind
from runahead.config import DType, ModelName, PrefillName
from runahead.model.shares import load_model
from runahead.report import GenerationBatch

CONFIG = ROOT / "benchmarks" / "models" / "llama-8-heads.json"
NEW_TOKENS = 12
PROBES = [256, 512, 1024, 2048]


def measure(run: Run) -> Iterator[Line]:
    """Measure a line per length."""
    options = run.options
    chosen = ModelOptions(name=ModelName.random, config=str(CONFIG), dtype=DType.float32, layers=options.layers)
    size = ModelSize.of(chosen)
    with Ranks.start(RanksOptions(device=Kind.cpu, threads=1)) as ranks:
        whole = Model.load(chosen, ranks.device)
        link = ping(ranks)
        ranks.arrange(ranks.size)
        shared = load_model(chosen, ranks)
        summed = allreduce_link(ranks, max(options.tokens) * size.shape.model_dim * size.item_bytes)
        as_shares = Engine(shared, ranks)
        ranks.arrange(1)
        engines = {
            "one rank": (1, Engine(whole, ranks, prefill=PrefillOptions(name=PrefillName.single))),
            "chain": (1, Engine(whole, ranks, partition=even)),
            "shares": (ranks.size, as_shares),
        }
        assert link is not None
        compute = probe_compute(whole, chunks=PROBES, prefixes=PROBES, repeats=1)
        compute = ranks.broadcast(compute, 0, "the compute cost")
        for length in options.tokens:
            ids = torch.randint(size.shape.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
            turns = {name: _turn(ranks, shares, engine, ids) for name, (shares, engine) in engines.items()}
            batches = run.in_turn(turns, options.rounds, warmup=1)
            ttft_s = {name: [batch.ttft_s for batch in each] for name, each in batches.items()}
            tpot_s = {name: [batch.tpot_s or 0.0 for batch in each] for name, each in batches.items()}
            machine = replace(_machine(size, median(tpot_s["one rank"]), length, summed), measured=compute)
            shares = Cluster(
                compute=machine.compute(size, 2), speed=[1.0], links=None, kv_bytes_per_token=size.kv_bytes_per_token(2)
            )
            chain = Cluster(
                compute=compute,
                speed=[1.0] * 2,
                links=Links(2, link),
                kv_bytes_per_token=size.kv_bytes_per_token(),
            )
            one_s = simulate(even(length, 1), replace(shares, compute=compute)).ttft_s
            read = _read_bytes(size, 2, length)
            layer_s = ALLREDUCES * allreduce_s(size.shape.model_dim * size.item_bytes, 2, summed)
            yield {
                "tokens": length,
                "layers": size.shape.num_layers,
                "ttft_s": ttft_s,
                "tpot_s": tpot_s,
                "predicted_ttft_s": {
                    "one rank": one_s,
                    "chain": simulate(even(length, 2), chain).ttft_s,
                    "shares": simulate(even(length, 1), shares).ttft_s,
                },
                "predicted_tpot_s": {
                    "one rank": median(tpot_s["one rank"]),
                    "shares": read / machine.device.memory_Bps + size.shape.num_layers * layer_s,
                },
                "allreduce_link": summed.as_json(),
            }


def _turn(ranks: Ranks, num_shares: int, engine: Engine, ids: list[int]) -> Callable[[int], GenerationBatch]:
    greedy = GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def run(_: int) -> GenerationBatch:
        ranks.arrange(num_shares)
        try:
            return engine.generate([ids], greedy)
        finally:
            ranks.arrange(1)

    return run


def _read_bytes(size: ModelSize, num_shares: int, num_tokens: int) -> float:
    """Bytes that a new token reads: weights, keys and values."""
    kv = size.shape.num_layers * num_tokens * size.kv_bytes_per_token(num_shares)
    return size.read_bytes(num_shares) + kv


def _machine(size: ModelSize, token_s: float, num_tokens: int, link: Link) -> Machine:
    """A machine whose memory delivers what one rank reads for a token in the time that it took."""
    device = Device(
        name="rank",
        memory_bytes=0,
        matmul_flops=1.0,
        attention_flops=1.0,
        memory_Bps=_read_bytes(size, 1, num_tokens) / token_s,
        step_s=0.0,
    )
    return Machine(device=device, num_gpus=2, num_nodes=1, inside=link, between=None)


def allreduce_link(ranks: Ranks, num_bytes: int, rounds: int = 9) -> Link:
    """The link by which the model of all-reduces gives the measured times, of few bytes and of `num_bytes`."""
    group = ranks.stage_group()

    def seconds(count: int) -> float:
        tensor, times = torch.zeros(count // 4), []
        for _ in range(rounds):
            ranks.barrier("an all-reduce")
            began_s = time.perf_counter()
            ranks.collectively("an all-reduce", lambda: dist.all_reduce(tensor, group=group))
            times.append(time.perf_counter() - began_s)
        return float(ranks.broadcast(median(times), 0, "an all-reduce"))

    small_s, large_s = seconds(64), seconds(num_bytes)
    steps = 2 * ceil(log2(ranks.size))
    sent = allreduce_sent_bytes(num_bytes, ranks.size)
    return Link(latency_s=small_s / steps, bandwidth_Bps=sent / max(large_s - small_s, 1e-9))


def table(found: list[Line]) -> str:
    """TTFT over one rank's and time per token over one rank's, predicted and measured, by length."""
    rows: Rows = [("tokens", "mesh", "TTFT, one rank over it", "predicted", "a token, one rank over it", "predicted")]
    for line in last_run(found):
        for name, mesh in (("chain", "2 x 1"), ("shares", "1 x 2")):
            rows.append(
                (
                    f"{line['tokens']:,}",
                    mesh,
                    _ratios(line["ttft_s"], name),
                    f"{line['predicted_ttft_s']['one rank'] / line['predicted_ttft_s'][name]:.2f}",
                    _ratios(line["tpot_s"], name) if name == "shares" else "",
                    f"{line['predicted_tpot_s']['one rank'] / line['predicted_tpot_s'][name]:.2f}"
                    if name == "shares"
                    else "",
                )
            )
    return text_table(rows, left=(1,))


def _ratios(by_name: dict[str, list[float]], name: str) -> str:
    """Median and range over rounds of one rank's time over another's."""
    each = [one / other for one, other in zip(by_name["one rank"], by_name[name], strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


STUDY = Study(
    name="ranks.mesh_prediction",
    text=__doc__,
    has="predicted_ttft_s",
    measure=measure,
    table=table,
    options={"tokens": option([512, 1024, 2048]), "layers": option(8), "rounds": option(3)},
)

if __name__ == "__main__":
    STUDY.main()
