"""Look of the pictures: colours, axes, titles and numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

INK, MUTED = "#1f2933", "#7b8794"
GRID, FRAME = "#e4e7eb", "#cbd2d9"
ACCENT = "#d9480f"
"""Colour of the most important element, such as the best split."""

SUBJECT_CHARACTER = 0.068
"""Width of a character of a subject in inches, in the mean and a little more."""

MOST_TICKS = 10
"""Most prompt lengths that are readable side by side on an axis."""

Colour = tuple[float, float, float, float]


def new_figure(width: float, height: float) -> Figure:
    """Make a white figure; `width` and `height` in inches. Without pyplot, so no display and no globals are needed."""
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def rows_and_columns(number: int, most_columns: int) -> tuple[int, int]:
    """Rows and columns for `number` panels, with few empty places."""
    rows = -(-number // most_columns)
    return rows, -(-number // rows)


def panels(figure: Figure, number: int, rows: int, columns: int) -> list[Any]:
    """Axes of `number` panels, row by row; empty places in the last row are blank."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for blank in axes[number:]:
        blank.set_axis_off()
    return axes[:number]


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def set_title(figure: Figure, title: str, subject: str = "") -> None:
    """Set a bold title at the top left, and the subject in small type below it, in as many lines as it needs."""
    # Empty lines of the title make room for the subject, whose position is relative to the title.
    lines = wrap(subject, int(figure.get_figwidth() / SUBJECT_CHARACTER))
    heading = figure.suptitle(title + "\n" * len(lines), x=0.008, ha="left", fontsize=13, fontweight="bold", color=INK)
    if lines:
        text = "\n".join(lines)
        note = figure.axes[0].annotate(text, (0, 0), xycoords=heading, va="bottom", fontsize=9, color=MUTED)
        note.set_annotation_clip(False)
        note.set_in_layout(False)


def style_axes(axes: Any, *, title: str = "", x: str = "", y: str = "", grid: str = "both") -> None:
    """Set title and labels of axes in the project's style; `grid` is "x", "y", "both" or ""."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8.5, colors=MUTED, length=3, color=FRAME)
    axes.tick_params(which="minor", length=0)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(FRAME)


def colours(number: int, *, last: float = 0.88) -> list[Colour]:
    """`number` colours from dark to light, distinguishable in print too; `last` is the place of the lightest one."""
    viridis = matplotlib.colormaps["viridis"]
    return [viridis(last * at / max(number - 1, 1)) for at in range(number)]


def ink_on(colour: Colour) -> str:
    """Text colour that is readable on a background colour."""
    red, green, blue, _ = colour
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def set_lengths(axes: Any, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic with prompt lengths as ticks, as many as fit; the longest one is always shown."""
    axes.set_xscale("log", base=2)
    apart = (max(lengths) / min(lengths)) ** (1 / MOST_TICKS)
    shown: list[int] = []
    for length in sorted(lengths, reverse=True):
        if not shown or length * apart <= shown[-1]:
            shown.append(length)
    axes.set_xticks(shown, [tokens(length) for length in shown])
    axes.set_xticks([], minor=True)


def set_seconds(axis: Any, *, log: bool = False) -> None:
    """Format an axis of seconds. A logarithmic one has ticks at 1, 2 and 5 of a decade, more in a narrow range."""
    if log:
        low, high = axis.get_view_interval()
        subs = (1,) if high / low > 1e4 else (1, 2, 5) if high / low > 4 else range(1, 10)
        axis.set_major_locator(LogLocator(subs=subs, numticks=10))
    axis.set_major_formatter(lambda value, _: seconds(value))
    axis.set_minor_formatter(lambda value, _: "")


def tokens(number: int) -> str:
    """Short text of a prompt length: 4k is 4096."""
    return f"{number // 1024:,}k" if number % 1024 == 0 else f"{number:,}"


def seconds(value: float, *, aligned: bool = False) -> str:
    """Text of a time with three digits in s, ms or µs; `aligned` keeps trailing zeros, as in 80.0 ms."""
    if value >= 1000:
        return f"{value:,.0f} s"
    scale, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    digits = f"{value * scale:#.3g}".rstrip(".") if aligned else f"{value * scale:.3g}"
    return f"{digits} {unit}"
