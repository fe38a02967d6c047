"""Tables of docs/studies/paper_relations.md in Markdown, from the lines of paper_relations.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.harness.lines import Line
from benchmarks.harness.text_table import Rows, markdown
from partitioner.simulation.bounds import chain_dot_products, chain_tokens, kv_entries, tsp_dot_products, tsp_tokens
from partitioner.table.lookup_table import worthwhile
from runahead.context import ContextPartition
from runahead.picture_style import seconds, tokens

TSP = ("TSP dense", "TSP causal")
ZIGZAG = ("zigzag all-gather", "zigzag ring")
SHORT = {"TSP dense": "t", "TSP causal": "t", "zigzag all-gather": "z", "zigzag ring": "z", "one rank": "1"}
WIRED = ", wire per pair"
EQUAL = 0.01
"""Relative difference of TTFT below which methods are called equal."""


def of(lines: Iterable[Line], **values: Any) -> list[Line]:
    """Lines with these values."""
    return [line for line in lines if all(line.get(name) == value for name, value in values.items())]


def fastest(line: Line, names: Sequence[str]) -> tuple[str, float]:
    """The fastest of some methods, and its TTFT in seconds."""
    name = min(names, key=line["ttft_s"].__getitem__)
    return name, line["ttft_s"][name]


def lead(lines: list[Line], line: Line, *, place: str = "") -> tuple[float, str]:
    """Speed-up of KVR-S over the best other method, and that method's name; below 1 KVR-S is slower.

    Each method uses as many of the ranks as suit it: a chain can leave the others almost nothing, and so can peers.

    Args:
        place: suffix of methods' names for the kind of links; empty for one port per rank.
    """
    alike = of(lines, **{name: line[name] for name in ("study", "model", "GBps", "tokens")})
    usable = [each for each in alike if each["ranks"] <= line["ranks"]]
    ours_s = min(fastest(each, ["KVR-S", "KVR-S direct" + place])[1] for each in usable)
    others = [fastest(each, ["one rank", *(name + place for name in (*TSP, *ZIGZAG))]) for each in usable]
    name, other_s = min(others, key=lambda other: other[1])
    return other_s / ours_s, name.removesuffix(place)


def ratio(line: Line, slow: str, fast: str) -> float:
    return line["ttft_s"][slow] / line["ttft_s"][fast]


def tables(lines: list[Line]) -> str:
    """Format all tables; a table whose lines are missing is left out."""
    made = [table(lines) for table in (_paper, _noise, _winners, _today, _transfer, _far)]
    return "\n".join(each for each in made if each)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"**{title}**\n\n{markdown([head, *rows], right=False)}" if rows else ""


def _paper(lines: list[Line]) -> str:
    published = of(lines, study="published")
    llama = of(published, model="Llama 7B")
    rows: Rows = []

    def row(
        what: str, paper: str, say: Callable[[Line], str], *, model: str = "Llama 7B", GBps: int = 300, **values: Any
    ) -> None:
        rows.extend((what, paper, say(line)) for line in of(published, model=model, GBps=GBps, **values))

    def over_tsp(line: Line) -> str:
        return f"{ratio(line, 'TSP', 'KVR-S'):.2f}"

    row("KVR-S over TSP, Llama 7B, 4 ranks, 12k", "1.42", over_tsp, ranks=4, tokens=12288)
    for model, said in (("Llama 7B", "1.41"), ("Llama 7B, GQA8", "1.46"), ("Llama 7B, MQA", "1.48")):
        row(f"KVR-S over TSP, {model}, 8 ranks, 16k", said, over_tsp, model=model, ranks=8, tokens=16384)
    row("KVR-S over TSP, Falcon 7B, 8 ranks, 8k", "1.63", over_tsp, model="Falcon 7B", ranks=8, tokens=8192)
    low = "the same at 10 GB/s, Llama 7B, 4 ranks, 12k"
    row(low, "more than at 300 GB/s", over_tsp, ranks=4, tokens=12288, GBps=10)
    for name, said in (("KVR-S", "never"), ("KVR-E", "Llama 7B: never")):
        slower = sum(ratio(line, "TSP", name) < 1 for line in published)
        rows.append((f"{name} slower than TSP", said, f"{slower} of {len(published)} configurations"))
    for GBps in (300, 10, 1):
        gaps = [ratio(line, "KVR-S", "TTFT(p)") - 1 for line in of(llama, GBps=GBps)]
        if gaps:
            rows.append((f"KVR-S above TTFT(p), Llama 7B, {GBps} GB/s", "up to 17%", f"up to {max(gaps):.1%}"))
    bounds, boundary = "TTFT(p) over TTFT*(p), Llama 7B, 8 ranks, 16k", "first boundary, 2 ranks, 16k (Fig. 6a)"
    close = "close, except on 8 ranks"
    row(bounds, close, lambda line: f"{ratio(line, 'TTFT(p)', 'TTFT*(p)'):.2f}", ranks=8, tokens=16384)
    row(boundary, "9,728", lambda line: f"{line['boundaries'][1]:,}", ranks=2, tokens=16384)
    near = [line for length in (8192, 12288) for line in of(llama, ranks=4, tokens=length, GBps=300)]
    if len(near) == 2:
        shares = [[(b - a) / line["tokens"] for a, b in pairwise(line["boundaries"])] for line in near]
        middle = ", ".join(f"{(a + b) / 2:.3f}" for a, b in zip(*shares, strict=True))
        rows.append(("shares at 10k between 8k and 12k, 4 ranks (Fig. 10)", "0.350, 0.255, 0.210, 0.185", middle))
    for ranks, said in ((2, "0.16 s"), (4, "0.19 s")):
        for GBps, paper in ((10, said), (1, "worse than at 10 GB/s")):
            for line in of(llama, ranks=ranks, tokens=2048, GBps=GBps):
                times = "; ".join(seconds(line["ttft_s"][name]) for name in ("KVR-S", "KVR-E"))
                rows.append((f"TTFT, 2k, {ranks} ranks, {GBps} GB/s (App. B), KVR-S; KVR-E", paper, times))
    worked = ContextPartition(boundaries=(0, 4, 7, 9))
    theirs = (f"{kv_entries(tsp_tokens(9, 3)):.0f} and {tsp_dot_products(9, 3):.0f}", "36 and 27")
    ours = (f"{kv_entries(chain_tokens(worked)):.0f} and {max(chain_dot_products(worked))}", "22 and 21")
    for name, (formula, said) in (("TSP", theirs), ("KV-Runahead", ours)):
        rows.append((f"K,V entries sent, and most dot products of a rank: 9 tokens as 4/3/2, {name}", said, formula))
    return _table("The paper and the simulation", ("relation", "paper", "simulation"), rows)


def _noise(lines: list[Line]) -> str:
    rows = []
    for GBps in (300, 10):
        found = of(lines, study="noise", GBps=GBps)
        for name in ("TSP", "KVR-E", "KVR-S") if found else ():
            said = {"TSP": "over 10% on average", "KVR-E": "3.7% at most", "KVR-S": "3.7% at most"}[name]
            losses = [line["slowdown"][name] - 1 for line in found]
            rows.append((name, f"{GBps}", said, f"{sum(losses) / len(losses):.1%}", f"{max(losses):.1%}"))
    head = ("method", "GB/s", "paper loses", "simulation, mean", "simulation, most")
    return _table("A disturbed pair of ranks (Fig. 11)", head, rows)


def _winners(lines: list[Line]) -> str:
    rows = []
    today = of(lines, study="today")
    for model in dict.fromkeys(line["model"] for line in today):
        for ranks in sorted({line["ranks"] for line in today}):
            row = [model, str(ranks)]
            for GBps in sorted({line["GBps"] for line in today}, reverse=True):
                leads = [lead(today, line) for line in of(today, model=model, ranks=ranks, GBps=GBps)]
                won = Counter(
                    "=" if abs(factor - 1) < EQUAL else "k" if factor > 1 else SHORT[name] for factor, name in leads
                )
                factors = [factor for factor, _ in leads]
                counts = " ".join(f"{won[key]}{key}" for key in "kzt1=" if won[key])
                row.append(f"{counts}; {min(factors) - 1:+.0%} to {max(factors) - 1:+.0%}")
            rows.append(row)
    head = ["model", "ranks", *(f"{GBps} GB/s" for GBps in sorted({line["GBps"] for line in today}, reverse=True))]
    return _table("Winners", head, rows)


def _today(lines: list[Line]) -> str:
    rows = []
    for line in of(lines, study="today", model="Llama 3 8B", ranks=8):
        if line["tokens"] in (2048, 16384, 131072):
            ttft_s = line["ttft_s"]
            names = ("one rank", "KVR-E", "KVR-S", "KVR-S direct")
            zigzag_s, bound_s = fastest(line, ZIGZAG)[1], ttft_s["TTFT(p)"]
            values = [*(ttft_s[name] for name in (*names, *TSP)), zigzag_s, bound_s, ttft_s["TTFT*(p)"]]
            rows.append([tokens(line["tokens"]), str(line["GBps"]), *(seconds(value) for value in values)])
    head = ("prompt", "GB/s", "one rank", "KVR-E", "KVR-S", "direct", *TSP, "zigzag", "TTFT(p)", "TTFT*(p)")
    return _table("Llama 3 8B on 8 ranks", head, rows)


def _transfer(lines: list[Line]) -> str:
    rows = []
    for ranks in (4, 8):
        for GBps in (300, 25, 10, 1):
            found = of(lines, study="today", ranks=ranks, GBps=GBps)
            if not found:
                continue
            row = [str(ranks), str(GBps)]
            for direct in ("KVR-S direct", "KVR-S direct" + WIRED):
                gains = [ratio(line, "KVR-S", direct) - 1 for line in found]
                row.append(f"{min(gains):+.1%} to {max(gains):+.1%}")
            wired = [lead(lines, line, place=WIRED)[0] - 1 for line in found]
            row.append(f"{min(wired):+.1%} to {max(wired):+.1%}")
            rows.append(row)
    head = ("ranks", "GB/s", "one port per rank", "wire per pair", "KVR-S ahead of the best other, wire per pair")
    return _table("How much faster direct transfer is than relay", head, rows)


def best_ranks(lines: list[Line], line: Line) -> tuple[int, int]:
    """Best numbers of ranks for one prompt and bandwidth: with searched splits, and with even ones."""
    alike = of(lines, **{name: line[name] for name in ("study", "model", "GBps", "tokens")})
    one_s = line["ttft_s"]["one rank"]
    searched, evens = (
        worthwhile({1: one_s, **{each["ranks"]: each["ttft_s"][name] for each in alike}}) for name in ("KVR-S", "KVR-E")
    )
    return searched, evens


def _far(lines: list[Line]) -> str:
    rows = [
        (name, seconds(value), f"{line['ttft_s']['one rank'] / value:.1f}")
        for line in of(lines, study="far")
        for name, value in sorted(line["ttft_s"].items(), key=lambda item: item[1])
    ]
    return _table("Llama 3 8B, 1,024k tokens on 64 ranks, 25 GB/s", ("method", "TTFT", "times one rank"), rows)
