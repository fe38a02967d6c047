"""Picture of a timeline beside its trace: what every rank did during the prefill, and the layer skew between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from runahead.files import write_whole
from runahead.picture_style import INK, MUTED, new_figure, png, style_axes
from runahead.timeline.recording import ProfilerRecording
from runahead.timeline.trace import TraceSpan, picture_path, trace_json

WAIT_FACE, WAIT_HATCH = "#f1f3f5", "#c3cad1"
SEND = "#d9480f"
NO_LAYER = "#9aa5b1"

# Heights within a rank's band, which is 1 high and whose middle is the rank's number; the y axis points down.
BAND_TOP, BAND_HEIGHT = -0.38, 0.60
SEND_TOP, SEND_HEIGHT = 0.26, 0.07


def write_timeline(
    path: str | os.PathLike[str],
    spans_by_rank: Sequence[Sequence[TraceSpan]],
    *,
    names: Sequence[str] = (),
    ttft_s: float | None = None,
    subject: str = "",
    recordings: Sequence[ProfilerRecording] = (),
) -> None:
    """Write the trace to `path`, and the picture beside it.

    Args:
        recordings: of torch's profiler on every rank, for the trace.
        names: of the ranks; "rank 0" and so on by default.
        ttft_s: time of the first token, seconds since the prompt's start.
        subject: what ran, in a few words, for the picture.

    Raises:
        ValueError: `path` ends in .png.
        OSError: a file cannot be written.
    """
    picture = picture_path(path)
    write_whole(path, trace_json(spans_by_rank, names=names, ttft_s=ttft_s, recordings=recordings))
    write_whole(picture, timeline_png(spans_by_rank, names=names, ttft_s=ttft_s, subject=subject))


def timeline_png(
    spans_by_rank: Sequence[Sequence[TraceSpan]],
    *,
    names: Sequence[str] = (),
    ttft_s: float | None = None,
    subject: str = "",
    unit: str = "layer",
) -> bytes:
    """Draw the prefill: a band per rank with compute coloured by layer, waits hatched and sends as thin bars below.

    Lines join the ends of the same layer on neighbouring ranks: their slant is the layer skew.

    Args:
        spans_by_rank: spans of every rank.
        names: of the ranks; "rank 0" and so on by default.
        ttft_s: time of the first token. Spans that begin later are left out, since decoding takes much longer.
        subject: what ran, in a few words, below the title.
        unit: what the spans number as layers.

    Returns:
        The PNG.
    """
    shown = [[s for s in spans if ttft_s is None or s.start_s < ttft_s] for spans in spans_by_rank]
    num_layers = 1 + max((s.layer for spans in shown for s in spans if s.layer is not None), default=0)
    end_s = max([ttft_s or 0.0, *(s.end_s for spans in shown for s in spans)]) or 1.0

    figure = new_figure(11, 1.7 + 0.85 * max(len(shown), 1))
    axes = figure.add_subplot()
    colours = ScalarMappable(norm=Normalize(0, max(num_layers - 1, 1)), cmap="viridis")

    for rank, spans in enumerate(shown):
        _draw_rank(axes, rank, spans, colours)
    _draw_skew(axes, shown, num_layers)
    if ttft_s is not None:
        axes.axvline(ttft_s, color=INK, linewidth=1.2)
        bottom = (ttft_s, max(len(shown), 1) - 0.5)  # above is the subject
        label = axes.annotate("first token ", bottom, ha="right", va="bottom", fontsize=9, color=INK)
        label.set_annotation_clip(False)

    style_axes(axes, x="seconds since the prompt's start", grid="x")
    axes.set_xlim(0, end_s * 1.005)
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    labels = [name.replace(" (", "\n(") for name in names] or [f"rank {rank}" for rank in range(len(shown))]
    axes.set_yticks(range(len(shown)), labels)
    axes.tick_params(axis="x", length=3.5, color=MUTED)
    axes.tick_params(axis="y", length=0, labelsize=10, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    _add_legend(figure, {s.kind if s.layer is not None else "" for spans in shown for s in spans}, unit)
    title = "Prefill" if ttft_s is None else f"Time to first token: {ttft_s:.3g} s"
    axes.set_title(title + ("\n" if subject else ""), loc="left", fontsize=13, fontweight="bold", color=INK)
    note = axes.annotate(
        subject, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color=MUTED
    )
    note.set_in_layout(False)  # a long subject would make the axes narrower
    if num_layers > 1:
        aspect = max(12, 4 * len(shown))  # as thin for many ranks as for few
        bar = figure.colorbar(colours, ax=axes, pad=0.015, aspect=aspect, ticks=_ticks(num_layers))
        bar.set_label(unit, color=INK, fontsize=9)
        bar.ax.tick_params(labelsize=8, colors=INK, length=0)
        bar.ax.invert_yaxis()
        bar.outline.set_visible(False)
    return png(figure)


def _draw_rank(axes: Any, rank: int, spans: Sequence[TraceSpan], colours: Any) -> None:
    def bars(kind: str, top: float, height: float, **style: Any) -> None:
        chosen = [s for s in spans if s.kind == kind]
        if chosen:
            extents = [(s.start_s, max(s.end_s - s.start_s, 0.0)) for s in chosen]
            axes.broken_barh(extents, (rank + top, height), **style)

    bars("wait", BAND_TOP, BAND_HEIGHT, facecolor=WAIT_FACE, edgecolor=WAIT_HATCH, hatch="/////", linewidth=0)
    computed = [s for s in spans if s.kind == "compute"]
    faces = [NO_LAYER if s.layer is None else colours.to_rgba(s.layer) for s in computed]
    bars("compute", BAND_TOP, BAND_HEIGHT, facecolors=faces, edgecolor="white", linewidth=0.25)
    # The edge keeps a send visible that is shorter than a pixel.
    bars("send", SEND_TOP, SEND_HEIGHT, facecolor=SEND, edgecolor=SEND, linewidth=1)


def _draw_skew(axes: Any, spans_by_rank: Sequence[Sequence[TraceSpan]], num_layers: int) -> None:
    """Draw lines through the ends of a few layers, from rank to rank; ranks without compute are skipped."""
    ends = []
    for rank, spans in enumerate(spans_by_rank):
        computed = sorted((s for s in spans if s.kind == "compute" and s.layer is not None), key=lambda s: s.end_s)
        end_of_layer = {s.layer: s.end_s for s in computed}
        if end_of_layer:
            ends.append((rank, end_of_layer))
    halo = withStroke(linewidth=1.8, foreground="white", alpha=0.6)  # so that the lines show on dark layers
    for (upper, upper_ends), (lower, lower_ends) in pairwise(ends):
        for layer in _ticks(num_layers):
            if layer in upper_ends and layer in lower_ends:
                xs = [upper_ends[layer]] * 2 + [lower_ends[layer]] * 2
                ys = [rank + BAND_TOP + edge for rank in (upper, lower) for edge in (0, BAND_HEIGHT)]
                axes.plot(xs, ys, color=INK, linewidth=0.8, path_effects=[halo], zorder=3)


def _ticks(num_layers: int) -> list[int]:
    """About five layer numbers from the first layer to the last."""
    steps = min(num_layers - 1, 4)
    return sorted({round(step * (num_layers - 1) / steps) for step in range(steps + 1)}) if steps else [0]


def _add_legend(figure: Figure, present: set[str], unit: str) -> None:
    """Add a legend for the kinds of spans that are present; "" stands for compute outside the layers."""
    handles = {
        "compute": Patch(facecolor="#2a788e", label=f"compute, coloured by {unit}"),
        "": Patch(facecolor=NO_LAYER, label="compute outside the layers"),
        "wait": Patch(facecolor=WAIT_FACE, edgecolor=WAIT_HATCH, hatch="/////", linewidth=0, label="wait for KV"),
        "send": Patch(facecolor=SEND, label="send KV"),
    }
    shown = [handle for kind, handle in handles.items() if kind in present]
    figure.legend(handles=shown, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
