"""Table and curves of a study, declared by functions of a line."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import LOOKS, legend_below
from launch.program.text_table import text_table
from runahead.picture_style import new_figure, panels, png, set_title, style_axes

Chosen = Callable[[list[Line]], Iterable[Line]]
"""The lines that a table or a picture shows, such as `benchmarks.harness.study.newest(...)`."""
Value = Callable[[Line], float | None]
"""A number of a line; None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for a terminal, with a row per line.

    Attributes:
        columns: a line's cell, by heading.
        lines: the lines that have a row; by default all.
        left: columns that are aligned on the left.
    """

    columns: Mapping[str, Callable[[Line], str]]
    lines: Chosen = list
    left: Container[int] = (0,)

    def __call__(self, found: list[Line]) -> str:
        rows = [[cell(line) for cell in self.columns.values()] for line in self.lines(found)]
        return text_table([list(self.columns), *rows], left=self.left)


@dataclass(frozen=True)
class Panel:
    """A part of a picture.

    Attributes:
        title: of the panel.
        y_label, y: of a curve.
        bound: of a dotted curve in the same colour; None for no such curve.
        shows: whether a line is a point of this panel.
    """

    title: str
    y_label: str
    y: Value
    bound: Value | None = None
    shows: Callable[[Line], bool] = lambda line: True


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A picture with panels side by side, in each of which curves go through points of lines.

    Attributes:
        title, subject: of the picture.
        lines: the lines that are drawn.
        curve: name of the curve that a line belongs to.
        x_label, x: of all panels.
        panels: of the lines that are drawn.
        least: number of points below which a curve is left out.
        finish: sets the axes of a panel, given the lines in it.
    """

    title: str
    subject: Callable[[list[Line]], str]
    lines: Chosen
    curve: Callable[[Line], str]
    x_label: str
    x: Callable[[Line], float]
    panels: Callable[[list[Line]], list[Panel]]
    least: int = 1
    finish: Callable[[Any, list[Line]], None] = lambda axes, found: None

    def __call__(self, found: list[Line]) -> bytes:
        drawn = list(self.lines(found))
        names, parts = list(dict.fromkeys(map(self.curve, drawn))), self.panels(drawn)
        figure, shown = new_figure(1.0 + 3.5 * max(len(parts), 2), 4.4), dict[str, Any]()
        for part, axes in zip(parts, panels(figure, len(parts), 1, len(parts)), strict=True):
            here = [line for line in drawn if part.shows(line)]
            for name, look in zip(names, LOOKS, strict=False):
                of_curve = [line for line in here if self.curve(line) == name]
                points = self._points(of_curve, part.y)
                if len(points) >= self.least:
                    [shown[name]] = axes.plot(*zip(*points, strict=True), **look, markersize=6, label=name)
                    if part.bound is not None:
                        bounds = zip(*self._points(of_curve, part.bound), strict=True)
                        axes.plot(*bounds, color=look["color"], linestyle=":")
            style_axes(axes, title=part.title, x=self.x_label, y=part.y_label)
            self.finish(axes, here)
        legend_below(figure, list(shown.values()))
        set_title(figure, self.title, self.subject(drawn))
        return png(figure)

    def _points(self, of_curve: list[Line], y: Value) -> list[tuple[float, float]]:
        return sorted((self.x(line), value) for line in of_curve if (value := y(line)) is not None)


def from_zero(axes: Any, found: list[Line]) -> None:
    """`finish` of curves whose heights are compared: the axis begins at zero and leaves the highest marker whole."""
    highest = max((max(line.get_ydata()) for line in axes.get_lines()), default=1.0)
    axes.set_ylim(0, 1.08 * highest)
