"""Pictures of docs/paper_relations.md, from the lines of paper_relations.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import matplotlib.patches
from matplotlib.colors import TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.harness.lines import Line
from benchmarks.studies.paper_relations.tables import SHORT, WIRED, ZIGZAG, best_ranks, fastest, lead, of
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

Text = Callable[[Line], str]

SAID = {(4, 12288): 1.42, (8, 16384): 1.41}
"""Speed-ups over TSP reported in the paper for Llama 7B at 300 GB/s, by (ranks, tokens)."""
BLUE, ORANGE, GREEN, PINK, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
"""Okabe and Ito's colours, which colour-blind readers can distinguish."""
WIDEST = 0.4
"""Lead at which a map's colour is saturated."""


def _values(lines: list[Line], name: str) -> list[Any]:
    return sorted({line[name] for line in lines})


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
                ratios = [line["ttft_s"]["TSP"] / line["ttft_s"][name] for line in series]
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
        ticks = [tick for tick in (coarse if high > 1.8 else fine) if low < tick < high]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = [Line2D([], [], color=shade, linewidth=2, label=f"{ranks} ranks") for ranks, shade in shades.items()]
    handles += [
        Line2D([], [], color=INK, label="KVR-S"),
        Line2D([], [], color=INK, linestyle=":", label="KVR-E"),
        Line2D([], [], color="white", marker="*", markersize=10, markeredgecolor=ACCENT, label="paper, KVR-S"),
    ]
    _legend(figure, handles)
    set_title(figure, "KV-Runahead against TSP as published", "Llama 7B, dense attention without a fused kernel")
    return png(figure)


def bounds_png(lines: list[Line]) -> bytes:
    found = of(lines, study="today")
    most = max(_values(found, "ranks"))
    found = of(found, ranks=most)
    models = [model for model in ("Llama 7B", "Llama 3 8B") if of(found, model=model)]
    links = _values(found, "GBps")[::-1]
    figure = new_figure(3.1 * len(links), 2.9 * len(models) + 1.0)
    styles: dict[str, tuple[str, str, Sequence[str]]] = {
        "one rank": (MUTED, "-", ("one rank",)),
        "TSP dense": (PINK, "--", ("TSP dense",)),
        "TSP causal": (PINK, "-", ("TSP causal",)),
        "zigzag": (ORANGE, "-", ZIGZAG),
        "KVR-E": (SKY, "-", ("KVR-E",)),
        "KVR-S": (BLUE, "-", ("KVR-S", "KVR-S direct")),
        "TTFT*(p)": (INK, ":", ("TTFT*(p)",)),
    }
    all_axes = panels(figure, len(models) * len(links), len(models), len(links))
    for at, axes in enumerate(all_axes):
        model, GBps = models[at // len(links)], links[at % len(links)]
        series = of(found, model=model, GBps=GBps)
        for name, (colour, style, methods) in styles.items():
            ratios = [fastest(line, methods)[1] / line["ttft_s"]["TTFT(p)"] for line in series]
            width = 2.2 if name == "KVR-S" else 1.5
            axes.plot([line["tokens"] for line in series], ratios, style, color=colour, linewidth=width)
        axes.axhline(1, color=INK, linewidth=0.9)
        title = f"{model}, {GBps} GB/s"
        last_row, first = at >= len(all_axes) - len(links), at % len(links) == 0
        dress(axes, title=title, x="prompt, tokens" if last_row else "", y="TTFT / TTFT(p)" if first else "")
        set_lengths(axes, _values(found, "tokens"))
        axes.tick_params(axis="x", labelsize=7.5)
        axes.set_yscale("log")
        axes.set_ylim(0.75, 80)
        axes.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
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
    leads = {id(line): lead(found, line) for line in found}
    # Purple for ahead, orange for behind, white for equal.
    scale, norm = matplotlib.colormaps["PuOr"], TwoSlopeNorm(0, -WIDEST, WIDEST)

    def text(line: Line) -> str:
        factor, other = leads[id(line)]
        return f"{factor - 1:+.0%} {SHORT[other]}".replace("-0%", "0%").replace("+0%", "0%")

    def colour(line: Line) -> Any:
        return scale(norm(max(-WIDEST, min(WIDEST, leads[id(line)][0] - 1))))

    for at, axes in enumerate(panels(figure, len(models) * len(counts), len(models), len(counts))):
        model, ranks = models[at // len(counts)], counts[at % len(counts)]
        _map(axes, of(found, model=model, ranks=ranks), colour, text)
        last_row, first = at // len(counts) == len(models) - 1, at % len(counts) == 0
        title = f"{model}, up to {ranks} ranks"
        dress(axes, title=title, x="prompt, tokens" if last_row else "", y="GB/s per link" if first else "", grid="")
    set_title(
        figure,
        "Lead of KVR-S over the best other method",
        "purple: KVR-S is first, orange: it is behind; the other is z zigzag, t TSP with a causal kernel, 1 one rank",
    )
    return png(figure)


def transfer_png(lines: list[Line]) -> bytes:
    found = of(lines, study="today")
    models = [model for model in ("Llama 7B", "Llama 3 8B") if of(found, model=model)]
    links = _values(found, "GBps")[::-1]
    places = {"one port per rank": "", "a wire per pair of ranks": WIRED}
    figure = new_figure(8.4, 2.9 * len(models) + 1.0)
    shades = dict(zip(links, colours(len(links)), strict=True))
    counts = [ranks for ranks in _values(found, "ranks") if ranks > 2]
    styles = dict(zip(counts, ("-", "--") if len(counts) == 1 else (":", "-"), strict=False))
    columns = list(places.items())
    for at, axes in enumerate(panels(figure, 2 * len(models), len(models), 2)):
        model, (place, suffix) = models[at // 2], columns[at % 2]
        for GBps, shade in shades.items():
            for ranks, style in styles.items():
                series = of(found, model=model, GBps=GBps, ranks=ranks)
                relay_s = [line["ttft_s"]["KVR-S"] for line in series]
                direct_s = [line["ttft_s"]["KVR-S direct" + suffix] for line in series]
                gains = [100 * (relay / direct - 1) for relay, direct in zip(relay_s, direct_s, strict=True)]
                axes.plot([line["tokens"] for line in series], gains, style, color=shade, linewidth=1.7)
        axes.axhline(0, color=MUTED, linewidth=0.9)
        last_row, first = at // 2 == len(models) - 1, at % 2 == 0
        dress(
            axes,
            title=f"{model}, {place}",
            x="prompt, tokens" if last_row else "",
            y="direct is ahead of relay by, %" if first else "",
        )
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
    models = [model for model in ("Llama 7B", "Llama 3 8B") if of(found, model=model)]
    counts = [1, *_values(today, "ranks")]
    shades = dict(zip(counts, colours(len(counts), last=0.95)[::-1], strict=True))
    figure = new_figure(9.6, 2.5 * len(models) + 0.9)
    best = {id(line): best_ranks(lines, line) for line in found}
    for at, axes in enumerate(panels(figure, 2 * len(models), len(models), 2)):
        model, which = models[at // 2], at % 2

        def colour(line: Line, which: int = which) -> Any:
            return shades[best[id(line)][which]]

        def text(line: Line, which: int = which) -> str:
            return str(best[id(line)][which])

        _map(axes, of(found, model=model), colour, text)
        last_row = at // 2 == len(models) - 1
        title = f"{model}, {('searched', 'even')[which]} chunks"
        dress(axes, title=title, x="prompt, tokens" if last_row else "", y="" if which else "GB/s per link", grid="")
    subject = f"of {', '.join(map(str, counts))}: a doubling has to make the first token {WORTHWHILE:.0%} earlier"
    set_title(figure, "The best number of ranks", subject)
    return png(figure)


def _map(axes: Any, lines: list[Line], colour: Callable[[Line], Any], text: Text) -> None:
    """Draw a cell per line: prompt lengths by bandwidths, the fastest links on top."""
    lengths, links = _values(lines, "tokens"), _values(lines, "GBps")[::-1]
    for line in lines:
        x, y, shade = lengths.index(line["tokens"]), links.index(line["GBps"]), tuple(colour(line))
        axes.add_patch(matplotlib.patches.Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white", linewidth=1))
        rgba = shade if len(shade) == 4 else (*shade, 1.0)
        axes.text(x + 0.5, y + 0.5, text(line), ha="center", va="center", fontsize=7.5, color=ink_on(rgba))
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(len(links), 0)
    axes.set_xticks([at + 0.5 for at in range(len(lengths))], [tokens(length) for length in lengths])
    axes.set_yticks([at + 0.5 for at in range(len(links))], [f"{GBps:g}" for GBps in links])


def _legend(figure: Any, handles: list[Any]) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5, labelcolor=INK
    )


PICTURES = {
    "paper_relations_published.png": published_png,
    "paper_relations_bounds.png": bounds_png,
    "paper_relations_winners.png": winners_png,
    "paper_relations_transfer.png": transfer_png,
    "paper_relations_ranks.png": ranks_png,
}
