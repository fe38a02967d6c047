"""The paper's relations by simulation: KV-Runahead against TSP, zigzag and its bounds, at scales beyond one machine.

    python -m benchmarks.studies.paper_relations
    python -m benchmarks.studies.paper_relations --draw-only

Simulates everything and rewrites benchmarks/results/paper_relations.jsonl with a JSON line per configuration; draws
docs/studies/paper_relations_*.png and prints the tables of docs/studies/paper_relations.md from these lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from tqdm import tqdm

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.studies.paper_relations.pictures import PICTURES
from benchmarks.studies.paper_relations.tables import tables
from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import WeightBoundCost
from partitioner.cost.link import Link, Links
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import SearchResult
from partitioner.searches.planning import best_split, best_splits, practical_bound
from partitioner.searches.seeded import seeded_search
from partitioner.simulation.bounds import ttft_star
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.simulation.peers import simulate_tsp, simulate_zigzag
from runahead.config import Attention, Transfer
from runahead.context import ContextPartition, even

MATMUL_FLOPS = 200e12
"""Achieved FLOP/s of matrix products on an A100 in fp16, of 312e12 at peak."""
FUSED_FLOPS = 120e12
"""Achieved FLOP/s of a causal flash kernel, counting only pairs within the causal mask."""
MEMORY_BPS = 2e12
UNFUSED_BYTES = 20
"""Bytes that attention without a fused kernel moves per query, key and head: scores, masks and weights."""
UNFUSED_STEP_S, FUSED_STEP_S = 50e-6, 20e-6
"""Launch overhead in seconds of each step of a layer."""
LATENCY_S = 10e-6
BYTES = 2
"""Bytes per number in fp16."""
WEIGHT_TOKENS = MATMUL_FLOPS * BYTES / (2 * MEMORY_BPS)
"""Number of tokens whose multiply-adds with a weight take as long as reading it."""

RANKS = [2, 4, 8]
TRANSFER_EVALUATIONS = 300
FAR_EVALUATIONS = 150
NOISE = 0.5
"""Share of the bandwidth that is left to a pair of ranks beside other traffic."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    model_dim: int
    kv_dim: int
    mlp_dim: int
    vocab_size: int
    head_dim: int = 128
    num_layers: int = 32

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.kv_dim * BYTES

    def compute(self, *, published: bool) -> ComputeCost:
        """Cost of an A100: with dense attention in single operations as published, or with a causal fused kernel."""
        pair_flops = 4 * self.head_dim
        unfused_flops = pair_flops / (UNFUSED_BYTES / MEMORY_BPS + pair_flops / MATMUL_FLOPS)
        cost = WeightBoundCost.from_shape(
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            kv_dim=self.kv_dim,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab_size,
            matmul_flops=MATMUL_FLOPS,
            attention_flops=unfused_flops if published else FUSED_FLOPS,
            step_s=UNFUSED_STEP_S if published else FUSED_STEP_S,
            dense=published,
        )
        return replace(cost, weight_tokens=WEIGHT_TOKENS)


LLAMA_7B = Shape(model_dim=4096, kv_dim=4096, mlp_dim=11008, vocab_size=32000)
SHAPES = {
    "Llama 7B": LLAMA_7B,
    "Llama 7B, GQA8": replace(LLAMA_7B, kv_dim=1024),
    "Llama 7B, MQA": replace(LLAMA_7B, kv_dim=128),
    "Llama 3 8B": Shape(model_dim=4096, kv_dim=1024, mlp_dim=14336, vocab_size=128256),
    # Its MLP has two matrices of 4 x 4544 rows, not three, so two thirds of that.
    "Falcon 7B": Shape(model_dim=4544, kv_dim=64, mlp_dim=4 * 4544 * 2 // 3, vocab_size=65024, head_dim=64),
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Grid of configurations: models x lengths x bandwidths x RANKS."""

    name: str
    models: list[str]
    tokens: list[int]
    GBps: list[float]

    @property
    def published(self) -> bool:
        return self.name == "published"


K = 1024
PUBLISHED = Grid(
    name="published",
    models=["Llama 7B", "Llama 7B, GQA8", "Llama 7B, MQA", "Falcon 7B"],
    tokens=[1 * K, 2 * K, 4 * K, 8 * K, 12 * K, 16 * K],
    GBps=[300, 10, 1],
)
TODAY = Grid(
    name="today",
    models=["Llama 7B", "Llama 3 8B", "Falcon 7B"],
    tokens=[K << power for power in range(8)],
    GBps=[300, 25, 10, 1],
)
SLOWER = Grid(
    name="more bandwidths",
    models=["Llama 7B", "Llama 3 8B"],
    tokens=TODAY.tokens,
    GBps=[100, 4, 0.4, 0.1],
)
"""Further bandwidths, for the choice of the number of ranks; without other methods."""
QUICK = [
    replace(PUBLISHED, models=["Llama 7B"], tokens=[1 * K, 8 * K, 12 * K, 16 * K], GBps=[300, 10]),
    replace(TODAY, models=["Llama 7B", "Llama 3 8B"], tokens=[1 * K, 8 * K], GBps=[300, 1]),
    replace(SLOWER, models=["Llama 7B"], tokens=[1 * K, 8 * K], GBps=[0.1]),
]


def cluster_of(
    model: str,
    num_ranks: int,
    GBps: float,
    *,
    published: bool,
    transfer: Transfer = Transfer.relay,
    shared: bool = True,
) -> Cluster:
    link = Link.from_GBps(GBps, latency_s=LATENCY_S, shared=shared)
    return Cluster(
        compute=SHAPES[model].compute(published=published),
        speed=[1.0] * num_ranks,
        links=Links(num_ranks, link),
        kv_bytes_per_token=SHAPES[model].kv_bytes_per_token,
        transfer=transfer,
    )


def min_stride(num_tokens: int) -> int:
    return max(16, num_tokens // 256)


def lines_of(study: Grid, model: str, num_tokens: int, ranks: list[int]) -> Iterator[Line]:
    """Simulate all bandwidths and numbers of ranks for one prompt."""
    most, stride = max(ranks), min_stride(num_tokens)
    wide = cluster_of(model, most, study.GBps[0], published=study.published)
    free = {p: practical_bound(num_tokens, p, wide, min_stride=stride) for p in ranks}
    relayed = {}
    for GBps in study.GBps:
        cluster = cluster_of(model, most, GBps, published=study.published)
        relayed[GBps] = best_splits(num_tokens, cluster, min_stride=stride, candidates=ranks)
    for p in ranks:
        # The search for the bound is heuristic too, so its result is compared with the splits that it bounds.
        splits = [relayed[GBps][p].partition for GBps in study.GBps]
        uncommunicative = wide.without_communication()
        bound_s = min([free[p].cost_s, *(simulate(split, uncommunicative).ttft_s for split in splits)])
        for GBps in study.GBps:
            split, one_s = relayed[GBps][p], relayed[GBps][1].cost_s
            attention = Attention.dense if study.published else Attention.causal
            cluster = cluster_of(model, p, GBps, published=study.published)
            ttft_s = {
                "one rank": one_s,
                "KVR-E": simulate(even(num_tokens, p), cluster).ttft_s,
                "KVR-S": split.cost_s,
                "TTFT(p)": bound_s,
                "TTFT*(p)": ttft_star(one_s, p, attention),
            }
            if study.published:
                ttft_s["TSP"] = simulate_tsp(num_tokens, p, cluster).ttft_s
            elif study.name == TODAY.name:
                ttft_s |= _others(model, num_tokens, p, GBps, [split.partition, free[p].partition])
            about = {"study": study.name, "model": model, "ranks": p, "GBps": GBps, "tokens": num_tokens}
            yield about | {"boundaries": split.partition.boundaries, "ttft_s": ttft_s}


def _others(model: str, num_tokens: int, p: int, GBps: float, seeds: list[ContextPartition]) -> dict[str, float]:
    """TTFT of direct transfer, with one port per rank or a wire per pair, and of the peers, which send directly too."""
    ttft_s = {}
    for place, shared in (("", True), (", wire per pair", False)):
        cluster = cluster_of(model, p, GBps, published=False, transfer=Transfer.direct, shared=shared)
        stride, most = min_stride(num_tokens), TRANSFER_EVALUATIONS
        direct = best_split(num_tokens, p, cluster, min_stride=stride, seeds=seeds, max_evaluations=most)
        ttft_s[f"KVR-S direct{place}"] = direct.cost_s
        for name, attention in (("TSP dense", Attention.dense), ("TSP causal", Attention.causal)):
            ttft_s[name + place] = simulate_tsp(num_tokens, p, cluster, attention=attention).ttft_s
        for name, ring in (("zigzag all-gather", False), ("zigzag ring", True)):
            ttft_s[name + place] = simulate_zigzag(num_tokens, p, cluster, ring=ring).ttft_s
    return ttft_s


def noise_lines(published: list[Line]) -> Iterator[Line]:
    """Simulate Fig. 11: splits searched for quiet links, while a neighbouring pair has little bandwidth both ways."""
    for line in published:
        p, tokens = line["ranks"], line["tokens"]
        if line["model"] != "Llama 7B" or p < 4 or tokens < 8 * K or line["GBps"] < 10:
            continue
        quiet = cluster_of(line["model"], p, line["GBps"], published=True)
        assert quiet.links is not None
        link = quiet.links.default
        slow = replace(link, bandwidth_Bps=NOISE * link.bandwidth_Bps)
        noisy = [replace(quiet, links=Links(p, link, {(at, at + 1): slow, (at + 1, at): slow})) for at in range(p - 1)]
        splits = {"KVR-E": even(tokens, p), "KVR-S": ContextPartition(boundaries=tuple(line["boundaries"]))}
        ttft_s = {name: mean(simulate(split, each).ttft_s for each in noisy) for name, split in splits.items()}
        ttft_s["TSP"] = mean(simulate_tsp(tokens, p, each).ttft_s for each in noisy)
        slowdown = {name: seconds / line["ttft_s"][name] for name, seconds in ttft_s.items()}
        names = ("model", "ranks", "GBps", "tokens")
        yield {"study": "noise", **{name: line[name] for name in names}, "ttft_s": ttft_s, "slowdown": slowdown}


def far_line() -> Line:
    """Simulate a large configuration: 64 ranks and a million tokens."""
    model, p, GBps, tokens = "Llama 3 8B", 64, 25, 1024 * K
    relay = cluster_of(model, p, GBps, published=False)
    direct, free = replace(relay, transfer=Transfer.direct), relay.without_communication()

    def searched(cluster: Cluster) -> SearchResult:
        return seeded_search(
            lambda split: simulate(split, cluster).ttft_s,
            tokens,
            p,
            min_stride=64,
            seed=equal_work(tokens, p, cluster.compute),
            leave_out=False,
            max_evaluations=FAR_EVALUATIONS,
        )

    split = searched(relay)
    one_s = simulate(even(tokens, 1), cluster_of(model, 1, GBps, published=False)).ttft_s
    ttft_s = {
        "one rank": one_s,
        "KVR-E": simulate(even(tokens, p), relay).ttft_s,
        "KVR-S": split.cost_s,
        "KVR-S direct": searched(direct).cost_s,
        "TTFT(p)": min(searched(free).cost_s, simulate(split.partition, free).ttft_s),
        "TTFT*(p)": ttft_star(one_s, p, Attention.causal),
        "TSP causal": simulate_tsp(tokens, p, direct, attention=Attention.causal).ttft_s,
        "zigzag all-gather": simulate_zigzag(tokens, p, direct).ttft_s,
        "zigzag ring": simulate_zigzag(tokens, p, direct, ring=True).ttft_s,
    }
    about = {"study": "far", "model": model, "ranks": p, "GBps": GBps, "tokens": tokens}
    return about | {"boundaries": split.partition.boundaries, "ttft_s": ttft_s}


def measure(run: Run) -> Iterator[Line]:
    """Simulate all lines; a few of them with --quick."""
    quick = run.options.quick
    studies, ranks = (QUICK, [2, 4]) if quick else ([PUBLISHED, TODAY, SLOWER], RANKS)
    prompts = [(study, model, tokens) for study in studies for model in study.models for tokens in study.tokens]
    published = []
    with tqdm(total=len(prompts) + (not quick), unit="prompt") as progress:
        for study, model, tokens in prompts:
            progress.set_postfix_str(f"{study.name}, {model}, {tokens} tokens")
            lines = list(lines_of(study, model, tokens, ranks))
            published += lines if study.published else []
            yield from lines
            progress.update()
        yield from noise_lines(published)
        if not quick:
            yield far_line()
            progress.update()


STUDY = Study(
    name="paper_relations",
    text=__doc__,
    has="study",
    measure=measure,
    table=tables,
    options={"quick": option(False, "a few configurations, to see that everything runs")},
    pictures=PICTURES,
    replaces=True,
)

if __name__ == "__main__":
    STUDY.main()
