"""Pictures of docs/studies/paper_relations.md, from the lines of paper_relations.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import matplotlib
import matplotlib.patches
from matplotlib.colors import TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, PURPLE, SKY, VERMILION, legend
from benchmarks.studies.paper_relations.tables import SHORT, WIRED, ZIGZAG, best_ranks, fastest, lead, of, ratio
from partitioner.table.lookup_table import WORTHWHILE
from runahead.picture_style import (
    ACCENT,
    INK,
    MUTED,
    colours,
    dress,
    ink_on,
    new_figure,
    panels,
    png,
    set_lengths,
    set_title,
    tokens,
)

SAID = {(4, 12288): 1.42, (8, 16384): 1.41}
"""Speed-ups over TSP reported in the paper for Llama 7B at 300 GB/s, by (ranks, tokens)."""
WIDEST = 0.4
"""Lead at which a map's colour is saturated."""


def _values(lines: list[Line], name: str) -> list[Any]:
    return sorted({line[name] for line in lines})


def _models(lines: list[Line]) -> list[str]:
    return [model for model in ("Llama 7B", "Llama 3 8B") if of(lines, model=model)]


def published_png(lines: list[Line]) -> bytes:
    found = of(lines, study="published", model="Llama 7B")
    links = _values(found, "GBps")[::-1]
    figure = new_figure(3.7 * len(links), 3.9)
    counts = _values(found, "ranks")
    shades = dict(zip(counts, colours(len(counts)), strict=True))
    for axes, GBps in zip(panels(figure, len(links), 1, len(links)), links, strict=True):
        for ranks, shade in shades.items():
            series = of(found, GBps=GBps, ranks=ranks)
            lengths = [line["tokens"] for line in series]
            for name, style in (("KVR-S", "-"), ("KVR-E", ":")):
                ratios = [ratio(line, "TSP", name) for line in series]
                axes.plot(lengths, ratios, style, color=shade, linewidth=1.8, marker="o", markersize=3.5)
            if GBps == 300:
                for (count, length), factor in SAID.items():
                    if count == ranks:
                        axes.scatter(length, factor, s=90, marker="*", color=shade, edgecolors=ACCENT, zorder=4)
        axes.axhline(1, color=MUTED, linewidth=0.9)
        dress(axes, title=f"{GBps} GB/s per link", x="prompt, tokens", y="TTFT of TSP / TTFT" if GBps == 300 else "")
        set_lengths(axes, [length for length in _values(found, "tokens") if length != 12288])
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        fine, coarse = (0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), (0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4, 6)
        _set_ticks(axes.yaxis, [tick for tick in (coarse if high > 1.8 else fine) if low < tick < high])
    handles = [Line2D([], [], color=shade, linewidth=2, label=f"{ranks} ranks") for ranks, shade in shades.items()]
    handles += [Line2D([], [], color=INK, label="KVR-S"), Line2D([], [], color=INK, linestyle=":", label="KVR-E")]
    star: dict[str, Any] = {"marker": "*", "markersize": 10, "markeredgecolor": ACCENT}
    _legend(figure, [*handles, Line2D([], [], color="white", label="paper, KVR-S", **star)])
    set_title(figure, "KV-Runahead against TSP as published", "Llama 7B, dense attention without a fused kernel")
    return png(figure)


def bounds_png(lines: list[Line]) -> bytes:
    found = of(lines, study="today")
    most = max(_values(found, "ranks"))
    found = of(found, ranks=most)
    models = _models(found)
    links = _values(found, "GBps")[::-1]
    figure = new_figure(3.1 * len(links), 2.9 * len(models) + 1.0)
    styles: dict[str, tuple[str, str, Sequence[str]]] = {
        "one rank": (MUTED, "-", ("one rank",)),
        "TSP dense": (PURPLE, "--", ("TSP dense",)),
        "TSP causal": (PURPLE, "-", ("TSP causal",)),
        "zigzag": (VERMILION, "-", ZIGZAG),
        "KVR-E": (SKY, "-", ("KVR-E",)),
        "KVR-S": (BLUE, "-", ("KVR-S", "KVR-S direct")),
        "TTFT*(p)": (INK, ":", ("TTFT*(p)",)),
    }
    for axes, model, GBps in _grid(figure, models, links):
        series = of(found, model=model, GBps=GBps)
        for name, (colour, style, methods) in styles.items():
            ratios = [fastest(line, methods)[1] / line["ttft_s"]["TTFT(p)"] for line in series]
            width = 2.2 if name == "KVR-S" else 1.5
            axes.plot([line["tokens"] for line in series], ratios, style, color=colour, linewidth=width)
        axes.axhline(1, color=INK, linewidth=0.9)
        _dress(axes, title=f"{model}, {GBps} GB/s", y="TTFT / TTFT(p)")
        set_lengths(axes, _values(found, "tokens"))
        axes.tick_params(axis="x", labelsize=7.5)
        axes.set_yscale("log")
        axes.set_ylim(0.75, 80)
        _set_ticks(axes.yaxis, [1, 2, 5, 10, 20, 50])
    handles = [
        Line2D([], [], color=colour, linestyle=style, linewidth=2, label=name)
        for name, (colour, style, _) in styles.items()
    ]
    handles.append(Line2D([], [], color=INK, linewidth=0.9, label="TTFT(p)"))
    _legend(figure, handles)
    set_title(
        figure, "How far each method is from a prefill that communicates for free", f"{most} ranks, causal fused kernel"
    )
    return png(figure)


def winners_png(lines: list[Line]) -> bytes:
    found = of(lines, study="today")
    models, counts = list(dict.fromkeys(line["model"] for line in found)), _values(found, "ranks")
    figure = new_figure(4.6 * len(counts), 1.95 * len(models) + 1.1)
    # Purple for ahead, orange for behind, white for equal.
    scale, norm = matplotlib.colormaps["PuOr"], TwoSlopeNorm(0, -WIDEST, WIDEST)

    def cell(line: Line) -> tuple[Any, str]:
        factor, other = lead(found, line)
        text = f"{factor - 1:+.0%} {SHORT[other]}".replace("-0%", "0%").replace("+0%", "0%")
        return scale(norm(max(-WIDEST, min(WIDEST, factor - 1)))), text

    for axes, model, ranks in _grid(figure, models, counts):
        _map(axes, of(found, model=model, ranks=ranks), cell)
        _dress(axes, title=f"{model}, up to {ranks} ranks", y="GB/s per link", grid="")
    set_title(
        figure,
        "Lead of KVR-S over the best other method",
        "purple: KVR-S is first, orange: it is behind; the other is z zigzag, t TSP with a causal kernel, 1 one rank",
    )
    return png(figure)


def transfer_png(lines: list[Line]) -> bytes:
    found = of(lines, study="today")
    models = _models(found)
    links = _values(found, "GBps")[::-1]
    places = {"one port per rank": "", "a wire per pair of ranks": WIRED}
    figure = new_figure(8.4, 2.9 * len(models) + 1.0)
    shades = dict(zip(links, colours(len(links)), strict=True))
    counts = [ranks for ranks in _values(found, "ranks") if ranks > 2]
    styles = dict(zip(counts, ("-", "--") if len(counts) == 1 else (":", "-"), strict=False))
    for axes, model, place in _grid(figure, models, list(places)):
        for GBps, shade in shades.items():
            for ranks, style in styles.items():
                series = of(found, model=model, GBps=GBps, ranks=ranks)
                gains = [100 * (ratio(line, "KVR-S", "KVR-S direct" + places[place]) - 1) for line in series]
                axes.plot([line["tokens"] for line in series], gains, style, color=shade, linewidth=1.7)
        axes.axhline(0, color=MUTED, linewidth=0.9)
        _dress(axes, title=f"{model}, {place}", y="direct is ahead of relay by, %")
        set_lengths(axes, _values(found, "tokens"))
    handles = [Line2D([], [], color=shade, linewidth=2, label=f"{GBps} GB/s") for GBps, shade in shades.items()]
    handles += [Line2D([], [], color=INK, linestyle=style, label=f"{ranks} ranks") for ranks, style in styles.items()]
    _legend(figure, handles)
    set_title(figure, "Direct transfer against relay", "KVR-S, a split searched for each")
    return png(figure)


def ranks_png(lines: list[Line]) -> bytes:
    today = of(lines, study="today")
    most = max(_values(today, "ranks"))
    found = [line for line in lines if line["study"] in ("today", "more bandwidths") and line["ranks"] == most]
    models = _models(found)
    counts = [1, *_values(today, "ranks")]
    shades = dict(zip(counts, colours(len(counts), last=0.95)[::-1], strict=True))
    figure = new_figure(9.6, 2.5 * len(models) + 0.9)
    ways = ("searched", "even")
    for axes, model, way in _grid(figure, models, ways):

        def cell(line: Line, which: int = ways.index(way)) -> tuple[Any, str]:
            best = best_ranks(lines, line)[which]
            return shades[best], str(best)

        _map(axes, of(found, model=model), cell)
        _dress(axes, title=f"{model}, {way} chunks", y="GB/s per link", grid="")
    subject = f"of {', '.join(map(str, counts))}: a doubling has to make the first token {WORTHWHILE:.0%} earlier"
    set_title(figure, "The best number of ranks", subject)
    return png(figure)


def _grid(figure: Any, rows: Sequence[Any], columns: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """(axes, row, column) of a panel for each combination."""
    all_axes = panels(figure, len(rows) * len(columns), len(rows), len(columns))
    for axes, (row, column) in zip(all_axes, product(rows, columns), strict=True):
        yield axes, row, column


def _dress(axes: Any, *, title: str, y: str, **more: str) -> None:
    """Dress a panel of a grid over prompt lengths; only outer panels have labels."""
    place = axes.get_subplotspec()
    x = "prompt, tokens" if place.is_last_row() else ""
    dress(axes, title=title, x=x, y=y if place.is_first_col() else "", **more)


def _map(axes: Any, lines: list[Line], cell: Callable[[Line], tuple[Any, str]]) -> None:
    """Draw a cell per line, of a colour and with a text: prompt lengths by bandwidths, the fastest links on top."""
    lengths, links = _values(lines, "tokens"), _values(lines, "GBps")[::-1]
    for line in lines:
        x, y, (shade, text) = lengths.index(line["tokens"]), links.index(line["GBps"]), cell(line)
        axes.add_patch(matplotlib.patches.Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white", linewidth=1))
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink_on(shade))
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(len(links), 0)
    axes.set_xticks([at + 0.5 for at in range(len(lengths))], [tokens(length) for length in lengths])
    axes.set_yticks([at + 0.5 for at in range(len(links))], [f"{GBps:g}" for GBps in links])


def _set_ticks(axis: Any, ticks: list[float]) -> None:
    """Set the ticks of a logarithmic axis."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _legend(figure: Any, handles: list[Any]) -> None:
    legend(figure, handles=handles, loc="outside lower center", ncols=len(handles))


PICTURES = {
    "paper_relations_published.png": published_png,
    "paper_relations_bounds.png": bounds_png,
    "paper_relations_winners.png": winners_png,
    "paper_relations_transfer.png": transfer_png,
    "paper_relations_ranks.png": ranks_png,
}
