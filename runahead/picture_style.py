"""Look of the pictures: colours, axes, titles and numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

INK, MUTED = "#1f2933", "#7b8794"
GRID, FRAME = "#e4e7eb", "#cbd2d9"
ACCENT = "#d9480f"
"""Of what a reader should see first: the best split."""

MOST_TICKS = 10
"""Prompt lengths that can be read side by side."""

Colour = tuple[float, float, float, float]


def new_figure(width: float, height: float) -> Figure:
    """A white figure, in inches. Figure rather than pyplot: no display, no globals."""
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def rows_and_columns(number: int, most_columns: int) -> tuple[int, int]:
    """Of so many panels, with few places left over."""
    rows = -(-number // most_columns)
    return rows, -(-number // rows)


def panels(figure: Figure, number: int, rows: int, columns: int) -> list[Any]:
    """Axes in rows; the places that are left over in the last row stay blank."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for blank in axes[number:]:
        blank.set_axis_off()
    return axes[:number]


def png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def set_title(figure: Figure, title: str, subject: str = "") -> None:
    """A bold line at the top left, and what it is about in small below it."""
    # An empty line of the title makes room for the subject, which is put where the layout moves the title.
    text = title + ("\n" if subject else "")
    heading = figure.suptitle(text, x=0.008, ha="left", fontsize=13, fontweight="bold", color=INK)
    if subject:
        note = figure.axes[0].annotate(subject, (0, 0), xycoords=heading, va="bottom", fontsize=9, color=MUTED)
        note.set_annotation_clip(False)
        note.set_in_layout(False)


def dress(axes: Any, *, title: str = "", x: str = "", y: str = "", grid: str = "both") -> None:
    """The project's axes: little ink."""
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
    """From dark to light, told apart in print too."""
    viridis = matplotlib.colormaps["viridis"]
    return [viridis(last * at / max(number - 1, 1)) for at in range(number)]


def ink_on(colour: Colour) -> str:
    """What can be read on a colour."""
    red, green, blue, _ = colour
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def set_lengths(axes: Any, lengths: Sequence[int]) -> None:
    """A logarithmic x axis with prompt lengths as its ticks, as many as fit; the longest is always there."""
    axes.set_xscale("log", base=2)
    apart = (max(lengths) / min(lengths)) ** (1 / MOST_TICKS)
    shown: list[int] = []
    for length in sorted(lengths, reverse=True):
        if not shown or length * apart <= shown[-1]:
            shown.append(length)
    axes.set_xticks(shown, [tokens(length) for length in shown])
    axes.set_xticks([], minor=True)


def set_seconds(axis: Any, *, log: bool = False) -> None:
    """Times as the ticks of an axis; on a logarithmic one 1, 2 and 5 of every decade, or what fits a narrow range."""
    if log:
        low, high = axis.get_view_interval()
        subs = (1,) if high / low > 1e4 else (1, 2, 5) if high / low > 4 else range(1, 10)
        axis.set_major_locator(LogLocator(subs=subs, numticks=10))
    axis.set_major_formatter(lambda value, _: seconds(value))
    axis.set_minor_formatter(lambda value, _: "")


def tokens(number: int) -> str:
    """A prompt length, short: 4k is 4096."""
    return f"{number // 1024:,}k" if number % 1024 == 0 else f"{number:,}"


def seconds(value: float, *, aligned: bool = False) -> str:
    """Three digits, in the unit that reads well; `aligned` keeps the zeros among them, as 80.0 ms."""
    if value >= 1000:
        return f"{value:,.0f} s"
    scale, unit = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    digits = f"{value * scale:#.3g}".rstrip(".") if aligned else f"{value * scale:.3g}"
    return f"{digits} {unit}"
