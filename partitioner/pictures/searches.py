"""Pictures of searches (Fig. 6 of the paper): TTFT over the boundary of two ranks, and grids of three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from partitioner.searches.evaluations import Evaluation, SearchResult
from runahead.picture_style import (
    ACCENT,
    INK,
    MUTED,
    new_figure,
    panels,
    png,
    rows_and_columns,
    seconds,
    set_seconds,
    set_title,
    style_axes,
    tokens,
)

WORST_SHOWN = 1.0
"""Share above the best TTFT from which on all values have one colour."""
COLOUR_TICKS = (0, 0.001, 0.01, 0.03, 0.1, 0.25, 0.5, 1)
MOST_PANELS = 8
NEAR_EDGE = 0.3
"""Share of a panel's width at either side in which the text of the best split goes to the other side."""
FAR = 1.6
"""A curve is shown up to this multiple of the best TTFT."""


def boundary_png(searches: Mapping[int, SearchResult], subject: str = "") -> bytes:
    """Draw a panel per prompt length with TTFT over the boundary of two ranks; later evaluations are darker."""
    lengths = sorted(searches)
    rows, columns = rows_and_columns(len(lengths), 4)
    figure = new_figure(max(6.4, 3.9 * columns), 1.0 + 2.9 * rows)
    for axes, length in zip(panels(figure, len(lengths), rows, columns), lengths, strict=True):
        _draw_curve(axes, length, searches[length])
    set_title(figure, "Time to first token by the boundary between two ranks", subject)
    return png(figure)


def _draw_curve(axes: Any, length: int, search: SearchResult) -> None:
    costs = {step.boundaries[1]: step.cost_s for step in search.trail}
    places = sorted(costs)
    axes.plot(places, [costs[place] for place in places], color="#9aa5b1", linewidth=1.1, zorder=1)
    order = range(len(search.trail))
    axes.scatter(
        [step.boundaries[1] for step in search.trail],
        [step.cost_s for step in search.trail],
        c=order,
        cmap="viridis_r",
        s=22,
        edgecolors="white",
        linewidths=0.5,
        zorder=2,
    )
    best = search.partition.boundaries[1]
    axes.axvline(length / 2, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
    star = {"marker": "*", "s": 190, "color": ACCENT, "edgecolors": "white", "linewidths": 0.7, "clip_on": False}
    axes.scatter([best], [search.cost_s], zorder=3, **star)
    text = f"{best:,} + {length - best:,}"
    if (even_s := costs.get(length // 2, 0.0)) > search.cost_s:
        text += f"\n{even_s / search.cost_s - 1:.1%} faster than even"
    style_axes(axes, title=f"{tokens(length)} tokens: {seconds(search.cost_s)}", x="tokens of rank 0")
    # Only the surroundings of the minimum are shown.
    near = [place for place in places if costs[place] <= FAR * search.cost_s]
    shown = [*near, length / 2]
    margin = 0.1 * (max(shown) - min(shown)) or 0.1 * length
    axes.set_xlim(max(0, min(shown) - margin), min(length, max(shown) + margin))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    low, high = search.cost_s, max(costs[place] for place in near)
    axes.set_ylim(low - 0.22 * (high - low or low), high + 0.06 * (high - low or low))
    set_seconds(axes.yaxis)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    start, end = axes.get_xlim()
    place = (best - start) / (end - start)
    axes.annotate(
        text,
        (best, search.cost_s),
        (0, -9),
        textcoords="offset points",
        ha="left" if place < NEAR_EDGE else "right" if place > 1 - NEAR_EDGE else "center",
        va="top",
        fontsize=8,
        color=ACCENT,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def grids_png(search: SearchResult, subject: str = "") -> bytes:
    """Draw a heat map per level of a search over three ranks, and the path of the best split from level to level.

    Splits that leave a rank idle are not drawn, unless all do: they are at the edge, far from the others.
    """
    length = search.partition.num_tokens
    levels = _levels([step for step in search.trail if _all_work(step)] or search.trail)
    rows, columns = rows_and_columns(len(levels), 4)
    figure = new_figure(max(6.4, 1.0 + 3.15 * columns), 1.1 + 3.1 * rows)
    best_s = min(step.cost_s for level in levels for step in level)
    # A power scale, so that both the coarse grid and the surroundings of the minimum have different colours.
    shades = ScalarMappable(norm=PowerNorm(0.4, 0, WORST_SHOWN), cmap="viridis_r")
    axes_of_levels = panels(figure, len(levels), rows, columns)
    tried: list[Evaluation] = []
    start: list[Evaluation] = []
    for axes, level in zip(axes_of_levels, levels, strict=True):
        path = start + [step for step in level if step.is_best]
        _draw_grid(axes, level, [*tried, *start], shades, best_s)
        _draw_path(axes, path)
        tried += level
        start = path[-1:]
    for axes in axes_of_levels[-columns:]:
        axes.set_xlabel("boundary of ranks 0 and 1", fontsize=9, color=INK)
    for axes in axes_of_levels[::columns]:
        axes.set_ylabel("boundary of ranks 1 and 2", fontsize=9, color=INK)
    bar = figure.colorbar(shades, ax=axes_of_levels, pad=0.015, aspect=18 * rows, extend="max", ticks=COLOUR_TICKS)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"+{100 * value:g}%" if value else "best")
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.outline.set_visible(False)
    found = " + ".join(f"{chunk:,}" for chunk in search.partition.chunk_lengths)
    title = f"{tokens(length)} tokens on three ranks: {found} after {search.num_evaluations} evaluations"
    set_title(figure, f"{title}, {seconds(search.cost_s)}", subject)
    return png(figure)


def _levels(steps: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Group steps by level. If there are more than `MOST_PANELS`, those with the fewest steps join the one before."""
    levels = [list(group) for _, group in groupby(steps, key=lambda step: step.level)]
    while len(levels) > MOST_PANELS:
        smallest = min(range(1, len(levels)), key=lambda at: len(levels[at]))
        levels[smallest - 1] += levels.pop(smallest)
    return levels


def _all_work(step: Evaluation) -> bool:
    return all(a < b for a, b in pairwise(step.boundaries))


def _draw_grid(axes: Any, level: Sequence[Evaluation], tried: Sequence[Evaluation], shades: Any, best_s: float) -> None:
    """Draw a cell of a stride's size per split of a level, and per split of earlier levels in the same range."""
    stride = min(step.stride for step in level)
    half = stride / 2
    xs, ys = [step.boundaries[1] for step in level], [step.boundaries[2] for step in level]
    known = [
        step for step in tried if min(xs) <= step.boundaries[1] <= max(xs) and min(ys) <= step.boundaries[2] <= max(ys)
    ]
    for step in [*known, *level]:
        corner = step.boundaries[1] - half, step.boundaries[2] - half
        face = shades.to_rgba(step.cost_s / best_s - 1)
        axes.add_patch(Rectangle(corner, stride, stride, facecolor=face, edgecolor="white", linewidth=0.8))
    splits = "1 new split" if len(level) == 1 else f"{len(level)} new splits"
    style_axes(axes, title=f"stride {stride:,}: {splits}")
    # The same range in x and y, so that the cells are squares.
    reach = max(max(xs) - min(xs), max(ys) - min(ys)) / 2 + 1.2 * max(stride, 1)
    for set_limits, values in ((axes.set_xlim, xs), (axes.set_ylim, ys)):
        middle = (max(values) + min(values)) / 2
        set_limits(middle - reach, middle + reach)
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_path(axes: Any, path: Sequence[Evaluation]) -> None:
    halo = [withStroke(linewidth=3.2, foreground="white", alpha=0.85)]
    xs, ys = [step.boundaries[1] for step in path], [step.boundaries[2] for step in path]
    axes.plot(xs, ys, color=INK, linewidth=1.3, marker="o", markersize=3, path_effects=halo, zorder=3)
    if path:
        axes.scatter(xs[-1:], ys[-1:], marker="*", s=170, color=ACCENT, edgecolors="white", linewidths=0.7, zorder=4)
