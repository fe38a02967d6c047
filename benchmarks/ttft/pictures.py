"""Pictures of a comparison. Each function returns None where the lines have no data for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D

from benchmarks.harness.pictures import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Look
from benchmarks.ttft.comparison import Comparison, NetworkKind, Spread
from benchmarks.ttft.variants import BASELINE, VARIANTS, Traffic
from runahead.picture_style import (
    INK,
    MUTED,
    new_figure,
    panels,
    png,
    rows_and_columns,
    set_lengths,
    set_seconds,
    set_title,
    style_axes,
    tokens,
)

LOOKS = {
    "single": Look(BLACK, "o"),
    "kv_runahead": Look(VERMILION, "s", "--"),
    "kvr_e": Look(ORANGE, "s"),
    "kvr_s": Look(VERMILION, "D"),
    "kvr_free": Look(VERMILION, "d", ":"),
    "kvr_direct": Look(ORANGE, "v", "--"),
    "kvr_8": Look(ORANGE, "x", "--"),
    "kvr_4": Look(ORANGE, "x", ":"),
    "kvr_streaming": Look(ORANGE, "*", ":"),
    "tsp": Look(BLUE, "P"),
    "tsp_causal": Look(BLUE, "P"),
    "tsp_dense": Look(BLUE, "X", "--"),
    "zigzag": Look(GREEN, "^"),
    "pipeline": Look(PURPLE, "D"),
    "pipeline_even": Look(PURPLE, "D", "--"),
    "zigzag_ring": Look(GREEN, "v", "--"),
    "zigzag_direct": Look(GREEN, "<", ":"),
    "single_pyramidinfer": Look(BLACK, "o", ":"),
    "kvr_pyramidinfer": Look(VERMILION, "o", ":"),
    "tensor": Look(PURPLE, "*"),
    "compute_only": Look(MUTED, ".", ":"),
    "plain_transformers": Look(SKY, "h"),
}
HATCHES = {"-": "", "--": "//", ":": ".."}
"""Hatching of bars that corresponds to the dashes of lines."""
FREE, STAR = (0, (1, 1.5)), (0, (6, 4))
"""Dashes of TTFT(p) and of TTFT*(p)."""


def ttft_png(comparison: Comparison) -> bytes | None:
    """Draw TTFT over prompt lengths on the ranks' own network, with the bounds from compute."""
    network = _own_network(comparison)
    if network is None:
        return None
    figure = new_figure(7.6, 5.2)
    axes, lengths = figure.add_subplot(), comparison.lengths(network)
    for variant in comparison.variants():
        along = comparison.along_lengths(network, variant)
        _draw(axes, variant, [(length, point.seconds) for length, point in along.items()])
    bounds = [comparison.line(network, length)["bounds"] for length in lengths]
    axes.plot(lengths, [each["free_s"] for each in bounds], color=MUTED, linestyle=FREE, linewidth=1.6)
    axes.plot(lengths, [each["star_causal_s"] for each in bounds], color=MUTED, linestyle=STAR, linewidth=1)
    axes.set_yscale("log")
    style_axes(axes, x="prompt, tokens", y="time to first token")
    set_lengths(axes, lengths)
    set_seconds(axes.yaxis, log=True)
    _legend(axes, [axes], [_line(FREE, "TTFT(p): communication off"), _line(STAR, "TTFT*(p), causal: TTFT(1) / p")])
    set_title(figure, "Time to first token", f"{comparison.subject()}; bars: all runs")
    return png(figure)


def speedup_png(comparison: Comparison) -> bytes | None:
    """Draw speed-ups over one rank, round by round, over prompt lengths."""
    network = _own_network(comparison)
    if network is None or BASELINE not in comparison.variants():
        return None
    figure = new_figure(7.6, 5.2)
    axes, lengths = figure.add_subplot(), comparison.lengths(network)
    single = comparison.along_lengths(network, BASELINE)
    for variant in comparison.variants():
        along = comparison.along_lengths(network, variant) if variant != BASELINE else {}
        ratios = [(length, along[length].faster_than(single[length])) for length in along if length in single]
        _draw(axes, variant, [(length, ratio) for length, ratio in ratios if ratio is not None])
    bounds = [comparison.line(network, length)["bounds"] for length in lengths]
    allowed = [each["single_s"] / each["free_s"] for each in bounds]
    axes.axhline(1, color=INK, linewidth=1)
    axes.plot(lengths, allowed, color=MUTED, linestyle=FREE, linewidth=1.6)
    axes.axhline(comparison.place["ranks"], color=MUTED, linestyle=STAR, linewidth=1)
    style_axes(axes, x="prompt, tokens", y=f"times as fast as {BASELINE}")
    set_lengths(axes, lengths)
    axes.set_ylim(0, 1.3 * max(axes.get_ylim()[1], 1.0))  # room for the legend
    guides = [_line(FREE, "TTFT(1) / TTFT(p): communication off"), _line(STAR, "number of ranks")]
    _legend(axes, [axes], guides, columns=2)
    set_title(figure, "Speed-up over one rank", f"{comparison.subject()}; ratios by round")
    return png(figure)


def links_png(comparison: Comparison) -> bytes | None:
    """Draw TTFT over the rate of the link, a panel per length."""
    networks = [network for network in comparison.networks() if network.gbps is not None and not network.noise]
    lengths = sorted({length for network in networks for length in comparison.lengths(network)})
    if not networks:
        return None
    rows, columns = rows_and_columns(len(lengths), 3)
    figure = new_figure(max(7.2, 4.6 * columns), 0.9 + 4.3 * rows)
    all_axes = panels(figure, len(lengths), rows, columns)
    for axes, length in zip(all_axes, lengths, strict=True):
        here = [network for network in networks if (network, length) in comparison.points]
        rates = [network.gbps for network in here if network.gbps is not None]
        for variant in comparison.variants():
            along = [(n.gbps, comparison.points[n, length].get(variant)) for n in here]
            _draw(axes, variant, [(rate, point.seconds) for rate, point in along if rate and point is not None])
        free_s = comparison.line(here[0], length)["bounds"]["free_s"]
        axes.axhline(free_s, color=MUTED, linestyle=FREE, linewidth=1.6)
        axes.set_xscale("log")
        axes.set_yscale("log")
        style_axes(axes, title=f"{tokens(length)} tokens", x="link, Gbit/s")
        axes.set_xticks(rates, [_rate_text(network) for network in here])
        axes.set_xticks([], minor=True)
        set_seconds(axes.yaxis, log=True)
    all_axes[0].set_ylabel("time to first token", fontsize=9, color=INK)
    _legend_below(figure, all_axes, [_line(FREE, "TTFT(p): communication off")])
    set_title(figure, "Time to first token over slow links", f"{comparison.subject()}; bars: all runs")
    return png(figure)


def bytes_png(comparison: Comparison) -> bytes | None:
    """Draw the bytes that all ranks sent for the longest prompt, against the formulas, in units of its KV cache."""
    lines = [point.line for points in comparison.points.values() for point in points.values()]
    lines.sort(key=lambda line: (line["wire_bytes"] is not None, line["length"]))
    longest = {line["variant"]: line for line in lines}
    with_kv = (Traffic.chain, Traffic.gathered, Traffic.wanted)
    names = [name for name in comparison.variants() if VARIANTS[name].traffic in with_kv]
    if not names:
        return None
    figure = new_figure(max(6.2, 1.4 + 1.05 * len(names)), 4.6)
    axes = figure.add_subplot()
    for at, name in enumerate(names):
        line = longest[name]
        whole = line["kv_bytes_per_token"] * line["length"]
        axes.bar(at, line["sent_bytes"] / whole, 0.6, color=LOOKS[name].colour, alpha=0.85)
        axes.plot([at - 0.36, at + 0.36], [line["formula_bytes"] / whole] * 2, color=INK, linewidth=2)
        if line["wire_bytes"] is not None:
            axes.plot(at, line["wire_bytes"] / whole, marker="D", color="white", markeredgecolor=INK, markersize=6)
    style_axes(axes, y="K,V sent, in K,V of the whole prompt", grid="y")
    axes.set_xticks(range(len(names)), [f"{name}\n{tokens(longest[name]['length'])}" for name in names])
    axes.margins(y=0.25)
    measured = Line2D([], [], color=MUTED, linewidth=7, alpha=0.6, label="measured, all ranks")
    formula = Line2D([], [], color=INK, linewidth=2, label="formula")
    wire = Line2D([], [], color="white", marker="D", markeredgecolor=INK, label="on the wire, headers included")
    axes.legend(
        handles=[measured, formula, wire], frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", ncols=3
    )
    set_title(figure, "What travels between ranks", comparison.subject())
    return png(figure)


def noise_png(comparison: Comparison) -> bytes | None:
    """Draw the increase of TTFT on a link whose rate varies."""
    pairs = comparison.noise_pairs()
    if not pairs:
        return None
    by_length: dict[int, dict[tuple[NetworkKind, str], float]] = {}
    for network, length, name, quiet_s, noisy_s in sorted(pairs, key=lambda pair: pair[1]):
        by_length.setdefault(length, {})[network, name] = 100 * (noisy_s / quiet_s - 1)
    names = [name for name in comparison.variants() if any(name == pair[2] for pair in pairs)]
    most = max(len({network for network, _ in percent}) for percent in by_length.values())
    figure = new_figure(max(7.2, 1.6 + 0.24 * len(names) * most), 1.2 + 3.0 * len(by_length))
    all_axes = panels(figure, len(by_length), len(by_length), 1)
    for axes, (length, percent) in zip(all_axes, by_length.items(), strict=True):
        _draw_noise(axes, names, percent)
        style_axes(axes, title=f"{tokens(length)} tokens", y="TTFT later, %", grid="y")
    all_axes[-1].set_xlabel("link, Gbit/s", fontsize=9, color=INK)
    _legend_below(figure, all_axes, [])
    set_title(figure, "How much later with noise on the link", f"{comparison.subject()}; medians")
    return png(figure)


def _draw_noise(axes: Any, names: Sequence[str], percent: dict[tuple[NetworkKind, str], float]) -> None:
    """Draw bars of one length: a group per rate."""
    networks = sorted({network for network, _ in percent}, key=lambda each: each.gbps or 0)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        at = [place for place, network in enumerate(networks) if (network, name) in percent]
        left = [place + (index - (len(names) - 1) / 2) * width for place in at]
        heights = [percent[networks[place], name] for place in at]
        look = LOOKS[name]
        axes.bar(
            left, heights, 0.9 * width, color=look.colour, label=name, hatch=HATCHES[look.dashes], edgecolor="white"
        )
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(range(len(networks)), [_rate_text(network) for network in networks])


PICTURES = {
    "bench_ttft.png": ttft_png,
    "bench_speedup.png": speedup_png,
    "bench_links.png": links_png,
    "bench_bytes.png": bytes_png,
    "bench_noise.png": noise_png,
}


def _own_network(comparison: Comparison) -> NetworkKind | None:
    """The network that was not shaped, or None."""
    return next((network for network in comparison.networks() if network.kind != "netns"), None)


def _draw(axes: Any, variant: str, spreads: Sequence[tuple[float, Spread]]) -> None:
    """Draw a line through medians, with error bars from the lowest to the highest."""
    if not spreads:
        return
    look = LOOKS[variant]
    xs, values = zip(*sorted(spreads, key=lambda each: each[0]), strict=True)
    medians = [spread.median for spread in values]
    errors = [[spread.median - spread.low for spread in values], [spread.high - spread.median for spread in values]]
    axes.errorbar(
        xs,
        medians,
        yerr=errors,
        color=look.colour,
        marker=look.marker,
        linestyle=look.dashes,
        linewidth=1.7,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=0.9,
        capsize=2,
        label=variant,
    )


def _line(dashes: Any, label: str) -> Line2D:
    return Line2D([], [], color=MUTED, linestyle=dashes, label=label)


def _legend(
    owner: Any, all_axes: Sequence[Any], more: Sequence[Line2D], *, where: str = "upper left", columns: int = 1
) -> None:
    """Give axes or a figure a legend of everything drawn, without error bars, and of `more`; each label once."""
    found: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found[label] = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    shown = {name: found[name] for name in VARIANTS if name in found} | {str(line.get_label()): line for line in more}
    ncols = min(columns, len(shown))
    owner.legend(shown.values(), shown.keys(), frameon=False, fontsize=8.5, labelcolor=INK, loc=where, ncols=ncols)


def _legend_below(figure: Any, all_axes: Sequence[Any], more: Sequence[Line2D]) -> None:
    columns = max(3, int(figure.get_figwidth() / 1.9))
    _legend(figure, all_axes, more, where="outside lower left", columns=columns)


def _rate_text(network: NetworkKind) -> str:
    share = "" if network.compute_share is None else f"\nK,V {network.compute_share:.0%}"
    return f"{network.gbps:.3g}{share}"
