"""TTFT of a chunked pipeline of layers beside a chain, zigzag and TSP, simulated on 2 to 64 ranks.

    python -m benchmarks.studies.pipeline
    python -m benchmarks.studies.pipeline --models "Llama 3 8B" --ranks 2 8

A100-like devices with causal fused kernels, as in docs/studies/paper_relations.md: links of 300, 25 and 1 GB/s with
one port per rank. Each method may leave ranks idle. The chain has the better of relay and direct transfer and a
searched split, zigzag the better of ring and all-gather, both sent directly. The pipeline has chunks that are searched
by the same search, the best of SGLang's dynamic ones, and the best even ones.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.declared import Curves, Panel
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option
from benchmarks.harness.text_table import markdown
from partitioner.cost.fitted import WeightBoundCost
from partitioner.cost.link import Link, Links
from partitioner.searches.best_split import best_chunks, best_split
from partitioner.searches.equal_work import dynamic_chunks
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.simulation.exchange import simulate_tsp, simulate_zigzag
from partitioner.simulation.pipeline import simulate_pipeline
from runahead.config import Attention, Transfer
from runahead.context import ContextPartition, even

MATMUL_FLOPS, ATTENTION_FLOPS, MEMORY_BPS = 200e12, 120e12, 2e12
"""Rates that an A100 reaches: products in fp16, a causal flash kernel, memory."""
BYTES = 2
"""Bytes per number in fp16."""
STEP_S, LATENCY_S = 20e-6, 10e-6
"""Launch overhead of each step of a layer, and of a message."""
LINKS = [300.0, 25.0, 1.0]
"""1e9 bytes per second in each direction: NVLink, 200 and 8 Gbit/s."""
EVEN = [2**power for power in range(9)]
"""Numbers of even chunks of a pipeline that are tried."""
FIELDS = ("model", "ranks", "GBps", "tokens")


@dataclass(frozen=True, kw_only=True)
class Shape:
    model_dim: int
    kv_dim: int
    mlp_dim: int
    vocab_size: int
    num_layers: int

    @property
    def activation_bytes(self) -> int:
        return self.model_dim * BYTES

    def cluster(self, num_ranks: int, GBps: float) -> Cluster:
        """Ranks of one device each."""
        compute = WeightBoundCost.from_shape(
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            kv_dim=self.kv_dim,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab_size,
            matmul_flops=MATMUL_FLOPS,
            attention_flops=ATTENTION_FLOPS,
            step_s=STEP_S,
        )
        return Cluster(
            compute=replace(compute, weight_tokens=MATMUL_FLOPS * BYTES / (2 * MEMORY_BPS)),
            speed=[1.0] * num_ranks,
            links=Links(num_ranks, Link.from_GBps(GBps, latency_s=LATENCY_S, shared=True)),
            kv_bytes_per_token=2 * self.kv_dim * BYTES,
        )


SHAPES = {
    "Llama 7B": Shape(model_dim=4096, kv_dim=4096, mlp_dim=11008, vocab_size=32000, num_layers=32),
    "Llama 3 8B": Shape(model_dim=4096, kv_dim=1024, mlp_dim=14336, vocab_size=128256, num_layers=32),
    "Llama 3 70B": Shape(model_dim=8192, kv_dim=1024, mlp_dim=28672, vocab_size=128256, num_layers=80),
}


def variants(options: Namespace) -> Iterator[Variant]:
    for model in options.models:
        if model not in SHAPES:
            raise ValueError(f"--models {model} is unknown; known are {', '.join(SHAPES)}")
        for num_ranks in options.ranks:
            for tokens in options.tokens:
                yield from ({"model": model, "ranks": num_ranks, "GBps": GBps, "tokens": tokens} for GBps in LINKS)


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """Simulate all methods for one prompt."""
    shape, num_ranks, tokens = SHAPES[variant["model"]], variant["ranks"], variant["tokens"]
    cluster = shape.cluster(num_ranks, variant["GBps"])
    ttft_s = {"one rank": simulate(even(tokens, 1), shape.cluster(1, variant["GBps"])).ttft_s}
    direct = replace(cluster, transfer=Transfer.direct)
    chains = [
        best_split(
            tokens,
            num_ranks,
            each,
            min_stride=max(16, tokens // 1024),
            max_evaluations=_evaluations(shape.num_layers * num_ranks**2, options.messages),
        )
        for each in (cluster, direct)
    ]
    ttft_s["chain"] = min(each.cost_s for each in chains)
    ttft_s["zigzag"] = min(simulate_zigzag(tokens, num_ranks, direct, ring=ring).ttft_s for ring in (False, True))
    ttft_s["TSP"] = simulate_tsp(tokens, num_ranks, direct, attention=Attention.causal).ttft_s

    def seconds(chunks: ContextPartition, stages: int) -> float:
        return simulate_pipeline(chunks, stages, cluster, activation_bytes=shape.activation_bytes).ttft_s

    stages = _stages(num_ranks, shape.num_layers)
    first = [64 * 2**power for power in range(12) if 64 * 2**power < 2 * tokens]
    dynamic = [dynamic_chunks(tokens, each, cluster.compute) for each in first]
    searched = {
        each: best_chunks(
            tokens,
            each,
            cluster,
            activation_bytes=shape.activation_bytes,
            min_stride=max(16, tokens // 1024),
            max_evaluations=_evaluations(64 * each, options.messages),
        )
        for each in stages
    }
    best = min(searched, key=lambda each: searched[each].cost_s)
    ttft_s["pipeline, even"] = min(seconds(even(tokens, n), each) for n in EVEN if n <= tokens for each in stages)
    ttft_s["pipeline, dynamic"] = min(seconds(chunks, each) for chunks in dynamic for each in stages)
    ttft_s["pipeline"] = min(searched[best].cost_s, ttft_s["pipeline, even"], ttft_s["pipeline, dynamic"])
    chunks = searched[best].partition.chunk_lengths
    yield variant | {"ttft_s": ttft_s, "stages": best, "chunks": chunks}


def _stages(num_ranks: int, num_layers: int) -> list[int]:
    """Numbers of stages that are tried: as many as fit, and the most of equally many layers."""
    most = min(num_ranks, num_layers)
    equal = max(each for each in range(1, most + 1) if num_layers % each == 0)
    return sorted({most, equal})


def _evaluations(messages: int, most: int) -> int:
    """Evaluations of a search in which so many messages are simulated in all."""
    return min(300, max(12, most // messages))


OTHERS = ("chain", "zigzag", "TSP", "one rank")


def _lead(line: Line) -> str:
    """By how much the pipeline is sooner than the best of the others, and which that is."""
    best = min(OTHERS, key=lambda other: line["ttft_s"][other])
    return f"{line['ttft_s'][best] / line['ttft_s']['pipeline'] - 1:+.0%} ({best})"


def table(found: list[Line]) -> str:
    """Leads of the pipeline, a row per model, length and link, and a column per number of ranks."""
    known = {tuple(line[name] for name in FIELDS): line for line in newest(*FIELDS)(found)}
    counts = sorted({line["ranks"] for line in found})
    rows = [["model", "prompt", "GB/s", "one rank", *(f"{count} ranks" for count in counts)]]
    for model in SHAPES:
        for tokens in sorted({line["tokens"] for line in found}):
            for GBps in LINKS:
                lines = [known.get((model, count, GBps, tokens)) for count in counts]
                alone = next((f"{line['ttft_s']['one rank']:.3g} s" for line in lines if line), "")
                leads = ["" if line is None else _lead(line) for line in lines]
                if alone:
                    rows.append([model, f"{tokens // 1024}k", f"{GBps:g}", alone, *leads])
    return markdown(rows)


DRAWN = {"model": "Llama 3 8B", "tokens": 16384}
"""Lines that the picture shows."""


def by_method(found: list[Line]) -> list[Line]:
    """A line for each method of each line that is drawn."""
    drawn = [line for line in newest(*FIELDS)(found) if DRAWN.items() <= line.items()]
    return [line | {"method": method} for method in ("chain", "zigzag", "TSP", "pipeline") for line in drawn]


def speed_up(line: Line) -> float:
    """Speed-up of a method over one rank."""
    return float(line["ttft_s"]["one rank"] / line["ttft_s"][line["method"]])


def bound(line: Line) -> float | None:
    """Speed-up of a pipeline by equal shares of the compute, or by the bytes on one link if these take longer.

    None for other methods.
    """
    if line["method"] != "pipeline":
        return None
    shape, stages = SHAPES[line["model"]], min(line["ranks"], SHAPES[line["model"]].num_layers)
    wire_s = line["tokens"] * shape.activation_bytes / (line["GBps"] * 1e9)
    return min(float(stages), float(line["ttft_s"]["one rank"] / wire_s))


def of_link(GBps: float) -> Panel:
    def shows(line: Line) -> bool:
        return bool(line["GBps"] == GBps)

    return Panel(f"{GBps:g} GB/s", "TTFT of one rank over that", speed_up, bound, shows=shows)


def doubling(axes: Any, found: list[Line]) -> None:
    """`finish` of curves over numbers of ranks, which double as speed-ups do."""
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("log", base=2)
        axis.set_major_formatter(lambda value, _: f"{value:g}")


PICTURE = Curves(
    title="Speed-up over one rank, simulated",
    subject=lambda found: (
        "{model}, {tokens:,} tokens; dotted: a pipeline's equal shares, or its bytes on a link".format(**found[-1])
    ),
    lines=by_method,
    curve=lambda line: str(line["method"]),
    x_label="ranks",
    x=lambda line: float(line["ranks"]),
    panels=lambda found: [of_link(GBps) for GBps in LINKS],
    finish=doubling,
)


def picture(found: list[Line]) -> bytes | None:
    """The picture, if there are lines for it."""
    return PICTURE(found) if by_method(found) else None


STUDY = Study(
    name="pipeline",
    text=__doc__,
    has="ttft_s",
    variants=variants,
    measure=measure,
    table=table,
    pictures={"paper_relations_pipeline.png": picture},
    page="paper_relations.md",
    options={
        "models": option(list(SHAPES), "of these"),
        "ranks": option([2, 4, 8, 16, 32, 64], "numbers of ranks"),
        "tokens": option([4096, 16384, 131072], "lengths of prompts"),
        "messages": option(300_000, "about how many messages a search simulates; 160,000 take a second"),
    },
)

if __name__ == "__main__":
    STUDY.main()
