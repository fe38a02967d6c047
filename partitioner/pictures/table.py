"""Pictures of a lookup table: share of each rank by prompt length (Fig. 10 of the paper), TTFT and speed-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.lines import Line2D

from partitioner.table.entry import Entry
from partitioner.table.lookup_table import LookupTable
from runahead.picture_style import (
    ACCENT,
    INK,
    MUTED,
    Colour,
    colours,
    dress,
    ink_on,
    new_figure,
    panels,
    png,
    rows_and_columns,
    set_lengths,
    set_seconds,
    set_title,
)

BETWEEN = 24
"""Number of lengths that are looked up between two entries."""
READABLE = 0.05
"""Least share that is labelled with its number."""
NARROW = 1.2
"""Width of bars (a factor) up to which they are not labelled."""

Bound = Mapping[tuple[int, int], float]
"""Seconds by (length, ranks)."""


def ratios_png(table: LookupTable, subject: str = "") -> bytes:
    """Draw a panel per number of ranks: a bar per entry with each rank's share, and lookups between the entries."""
    counts = [ranks for ranks in table.ranks() if ranks > 1] or table.ranks()
    rows, columns = rows_and_columns(len(counts), 2 if len(counts) == 4 else 3)
    num_bars = max((len(table.entries_for(ranks)) for ranks in counts), default=1)
    width = max(4.0, 1.6 + 0.62 * num_bars)
    figure = new_figure(max(6.0, columns * width), 0.8 + 3.9 * rows)
    for axes, ranks in zip(panels(figure, len(counts), rows, columns), counts, strict=True):
        _draw_ratios(axes, table, ranks)
    set_title(figure, "Every rank's share of the prompt", subject)
    return png(figure)


def _draw_ratios(axes: Any, table: LookupTable, ranks: int) -> None:
    entries, shades = table.entries_for(ranks), colours(ranks)
    for before, after in pairwise(entries):
        lengths = _lengths_between(before, after)
        splits = [table.lookup(length, ranks) for length in lengths]
        ends = [[split.boundaries[rank] / split.num_tokens for split in splits] for rank in range(ranks + 1)]
        for rank in range(ranks):
            axes.fill_between(lengths, ends[rank], ends[rank + 1], color=shades[rank], alpha=0.3, linewidth=0)
            axes.plot(lengths, ends[rank + 1], color="white", linewidth=0.8)
    width = _bar_width([entry.length for entry in entries])
    for entry in entries:
        _draw_bar(axes, entry, shades, width)
    for boundary in range(1, ranks):
        axes.axhline(boundary / ranks, color=INK, linewidth=0.7, linestyle=(0, (2, 3)), alpha=0.7)
    dress(axes, title=f"{ranks} ranks (dotted: even)" if ranks > 1 else "1 rank", x="prompt, tokens", grid="")
    set_lengths(axes, [entry.length for entry in entries])
    margin = width**0.9 if len(entries) > 1 else width**2
    axes.set_xlim(entries[0].length / margin, entries[-1].length * margin)
    axes.set_ylim(1, 0)
    last = [0.0, *accumulate(entries[-1].ratios)]
    working = [rank for rank in range(ranks) if entries[-1].ratios[rank] > 0]
    middles = [(last[rank] + last[rank + 1]) / 2 for rank in working]
    axes.yaxis.tick_right()
    axes.set_yticks(middles, [f"rank {rank}" for rank in working])
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.spines["left"].set_visible(False)


def _bar_width(lengths: Sequence[int]) -> float:
    """Width of bars, a factor as the axis is logarithmic: half the distance of the closest lengths, at most 1.45."""
    return min([1.45, *(math.sqrt(after / before) for before, after in pairwise(lengths))])


def _draw_bar(axes: Any, entry: Entry, shades: Sequence[Colour], width: float) -> None:
    ends = [0.0, *accumulate(entry.ratios)]
    left, right = entry.length / math.sqrt(width), entry.length * math.sqrt(width)
    for rank, share in enumerate(entry.ratios):
        axes.bar(
            left, share, right - left, ends[rank], align="edge", color=shades[rank], edgecolor="white", linewidth=0.8
        )
        if share > READABLE and width > NARROW:
            axes.annotate(
                f"{share:.1%}",
                (entry.length, ends[rank] + share / 2),
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(shades[rank]),
            )


def _lengths_between(before: Entry, after: Entry) -> list[int]:
    ratio = after.length / before.length
    return sorted({round(before.length * ratio ** (at / BETWEEN)) for at in range(BETWEEN + 1)})


def ttft_png(
    table: LookupTable, subject: str = "", *, free: Bound | None = None, ideal: Mapping[int, float] | None = None
) -> bytes:
    """Draw TTFT by prompt length for every number of ranks, with the best ringed, and speed-ups over one rank if known.

    Args:
        free: the paper's TTFT(p): seconds with communication that takes no time.
        ideal: largest possible speed-up by number of ranks: TTFT(1) / TTFT*(p) of the paper.
    """
    alone = {entry.length: entry.ttft_s for entry in table.entries_for(1)}
    compared = {
        ranks: [entry for entry in table.entries_for(ranks) if entry.length in alone] for ranks in table.ranks()[1:]
    }
    has_speedups = any(compared.values())
    figure = new_figure(11 if has_speedups else 6.4, 4.6)
    axes = panels(figure, 2, 1, 2) if has_speedups else panels(figure, 1, 1, 1)
    shades = dict(zip(table.ranks(), colours(len(table.ranks())), strict=True))
    lengths = sorted({entry.length for entry in table.entries})
    best = {entry.length: entry for entry in table.best_entries()}
    for ranks, shade in shades.items():
        entries = table.entries_for(ranks)
        _draw_line(axes[0], [(entry.length, entry.ttft_s) for entry in entries], shade, _ranks_text(ranks))
    _ring(axes[0], [(length, entry.ttft_s) for length, entry in best.items()], "the best number")
    axes[0].set_yscale("log")
    set_seconds(axes[0].yaxis, log=True)
    dress(axes[0], title="Time to first token", x="prompt, tokens")
    set_lengths(axes[0], lengths)
    axes[0].legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", ncols=1 + len(shades) // 8)
    if has_speedups:
        _draw_speedups(axes[1], compared, alone, shades, best, free or {}, ideal or {})
        set_lengths(axes[1], lengths)
    set_title(figure, "How many ranks to use, and what they bring", subject)
    return png(figure)


def _draw_speedups(
    axes: Any,
    compared: Mapping[int, list[Entry]],
    alone: Mapping[int, float],
    shades: Mapping[int, Colour],
    best: Mapping[int, Entry],
    free: Bound,
    ideal: Mapping[int, float],
) -> None:
    axes.axhline(1, color=MUTED, linewidth=0.9)
    for ranks, entries in compared.items():
        points = [(entry.length, alone[entry.length] / entry.ttft_s) for entry in entries]
        _draw_line(axes, points, shades[ranks], _ranks_text(ranks))
        ringed = [point for point, entry in zip(points, entries, strict=True) if entry is best[entry.length]]
        _ring(axes, ringed)
        known = [(e.length, alone[e.length] / free[e.length, ranks]) for e in entries if (e.length, ranks) in free]
        axes.plot(*zip(*known, strict=True) if known else ([], []), color=shades[ranks], linewidth=1.1, linestyle=":")
        if ranks in ideal:
            axes.axhline(ideal[ranks], color=shades[ranks], linewidth=0.9, linestyle=(0, (6, 4)), alpha=0.6)
    handles = [Line2D([], [], color=INK, linestyle=":", label="communication off, TTFT(p)")] if free else []
    if ideal:
        handles.append(Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (6, 4)), label="bound, TTFT*(p)"))
    dress(axes, title="Speed-up over one rank", x="prompt, tokens")
    axes.set_ylim(0, 1.22 * max([1.0, *axes.yaxis.get_data_interval()]))  # room for the legend
    axes.legend(handles=handles, frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", ncols=2)


def _draw_line(axes: Any, points: Sequence[tuple[float, float]], colour: Colour, label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, marker="o", markersize=4.5, label=label)


def _ring(axes: Any, points: Sequence[tuple[float, float]], label: str | None = None) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, s=75, facecolors="none", edgecolors=ACCENT, linewidths=1.5, zorder=3, label=label)


def _ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
