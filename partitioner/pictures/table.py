"""Pictures of a lookup table: share of each rank by prompt length (Fig. 10 of the paper), TTFT, speed-up, and more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from partitioner.pictures.searches import boundary_png, grids_png
from partitioner.searches.best_split import practical_bound
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import SearchResult
from partitioner.searches.record import SearchRecord
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.entry import TableEntry
from partitioner.table.fingerprint import link_text
from partitioner.table.lookup_table import LookupTable
from runahead.files import write_whole
from runahead.picture_style import (
    ACCENT,
    INK,
    MUTED,
    Colour,
    colours,
    ink_on,
    new_figure,
    panels,
    png,
    rows_and_columns,
    set_lengths,
    set_seconds,
    set_title,
    style_axes,
)
from runahead.timeline.picture import timeline_png

BETWEEN = 24
"""Number of lengths that are looked up between two entries."""
READABLE = 0.05
"""Least share that is labelled with its number."""
NARROW = 1.2
"""Width of bars (a factor) up to which they are not labelled."""
STRIDES = 64
"""Steps of an even chunk's length in which boundaries are searched for a bound."""

Bound = Mapping[tuple[int, int], float]
"""Seconds by (length, ranks)."""
MOST_CHUNKS = 4
"""Most chunks whose lengths fit into a picture's title."""


def save_pictures(table: LookupTable, record: SearchRecord, path: Path, *, folder: Path | None = None) -> list[Path]:
    """Draw the pictures of a table.

    Args:
        record: the searches of the table.
        path: the table's file, after which pictures are named.
        folder: folder of the pictures; that of the table by default.

    Returns:
        The files of the pictures.

    Raises:
        OSError: a file cannot be written.
    """
    written = []
    for name, image in pictures(table, record):
        file = (folder or path.parent) / f"{path.stem}.{name}.png"
        write_whole(file, image)
        written.append(file)
    return written


def pictures(table: LookupTable, record: SearchRecord) -> Iterator[tuple[str, bytes]]:
    """Draw all pictures of a table; yields names and PNGs.

    ratios, ttft; boundary: searches over two ranks; grids: the search over three ranks for the longest prompt;
    timeline-p: the simulated prefill with the best split of the longest prompt over p ranks.
    """
    if not table.entries:
        return
    about = table.fingerprint
    subject = _subject(table, about.place, f"{about.backend}, {about.transfer}")
    yield "ratios", ratios_png(table, subject)
    free = {
        (entry.length, entry.ranks): _without_communication(entry.length, record.clusters[entry.ranks])
        for entry in table.entries
        if entry.ranks > 1 and entry.ranks in record.clusters
    }
    # With a causal kernel TTFT(1) / TTFT*(p) is p; ranks count in proportion to their speeds.
    ideal = {ranks: sum(cluster.speed) / cluster.speed[0] for ranks, cluster in record.clusters.items() if ranks > 1}
    yield "ttft", ttft_png(table, subject, free=free, ideal=ideal)
    by_ranks: dict[int, dict[int, SearchResult]] = {}
    for (length, ranks), search in record.trails.items():
        by_ranks.setdefault(ranks, {})[length] = search
    if 2 in by_ranks:
        yield "boundary", boundary_png(by_ranks[2], subject)
    if 3 in by_ranks:
        yield "grids", grids_png(by_ranks[3][max(by_ranks[3])], subject)
    for ranks, cluster in sorted(record.clusters.items()):
        if ranks > 1 and table.entries_for(ranks):
            yield f"timeline-{ranks}", _timeline(table, ranks, cluster)


def _timeline(table: LookupTable, ranks: int, cluster: Cluster) -> bytes:
    entry = table.entries_for(ranks)[-1]
    simulated = simulate(entry.partition, cluster, record=True)
    chunks = f"{entry.length:,}"
    if ranks <= MOST_CHUNKS:
        chunks = " + ".join(f"{chunk:,}" for chunk in entry.partition.chunk_lengths)
    subject = f"predicted: {chunks} tokens; {_subject(table, table.fingerprint.transfer)}"
    # The simulation numbers places, of which a layer may have two, or none.
    unit = "layer" if cluster.compute.num_places == table.fingerprint.model.num_layers else "place (K,V or a state)"
    return timeline_png(simulated.spans, ttft_s=simulated.ttft_s, subject=subject, unit=unit)


def _without_communication(length: int, cluster: Cluster) -> float:
    """The paper's practical bound TTFT(p): the same chain with communication that takes no time.

    Then equal work is within a token of the best split, since no rank waits for another, unless for states: with these
    a split is searched.
    """
    if cluster.hands_on_states:
        stride = max(1, length // (STRIDES * cluster.num_ranks))
        return practical_bound(length, cluster.num_ranks, cluster, min_stride=stride).cost_s
    partition = equal_work(length, cluster.num_ranks, cluster.compute, cluster.speed)
    return simulate(partition, cluster.without_communication()).ttft_s


def _subject(table: LookupTable, *words: str) -> str:
    about = table.fingerprint
    links = [] if about.link is None else [link_text(about.link)]
    return "; ".join([f"{about.name or about.model.type}, {about.dtype}", *words, *links])


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
    style_axes(axes, title=f"{ranks} ranks (dotted: even)" if ranks > 1 else "1 rank", x="prompt, tokens", grid="")
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


def _draw_bar(axes: Any, entry: TableEntry, shades: Sequence[Colour], width: float) -> None:
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


def _lengths_between(before: TableEntry, after: TableEntry) -> list[int]:
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
    style_axes(axes[0], title="Time to first token", x="prompt, tokens")
    set_lengths(axes[0], lengths)
    axes[0].legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", ncols=1 + len(shades) // 8)
    if has_speedups:
        _draw_speedups(axes[1], compared, alone, shades, best, free or {}, ideal or {})
        set_lengths(axes[1], lengths)
    set_title(figure, "How many ranks to use, and what they bring", subject)
    return png(figure)


def _draw_speedups(
    axes: Any,
    compared: Mapping[int, list[TableEntry]],
    alone: Mapping[int, float],
    shades: Mapping[int, Colour],
    best: Mapping[int, TableEntry],
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
    style_axes(axes, title="Speed-up over one rank", x="prompt, tokens")
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
