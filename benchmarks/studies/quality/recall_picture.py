"""Picture of docs/studies/quality.md: recall and losses of retrieving policies against the bytes that they fetch."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import LOOKS, legend_below
from benchmarks.studies.quality.losses import AtShare, Compared, compared, heading, settings
from runahead.picture_style import MUTED, new_figure, panels, png, set_title, style_axes


def recall_picture(found: list[Line]) -> bytes | None:
    """Draw all methods that were measured, a row of panels per model and length; None if there is none."""
    measured = settings(found, "retrieving")
    if not measured:
        return None
    figure = new_figure(12.5, 0.8 + 4.4 * len(measured))
    axes = panels(figure, 3 * len(measured), len(measured), 3)
    for row, lines in enumerate(measured):
        of_recall, *of_losses = axes[3 * row : 3 * row + 3]
        methods = compared(lines, "retrieving")
        _draw(of_recall, methods, None)
        x = "K,V read, % of the context"
        style_axes(of_recall, title=heading(lines), x=x, y="recall: share of attention to what is read, %")
        for place, name in zip(of_losses, ("copy", "key -> value"), strict=True):
            _draw(place, methods, name)
            place.axhline(0, color=MUTED, linewidth=1, linestyle="--")
            style_axes(place, x=x, y=f"{name}: loss over the full cache, nats")
    legend_below(figure, axes[0].lines)
    set_title(figure, "What retrieving policies find, by the bytes that they read")
    return png(figure)


def _draw(axes: Any, methods: Compared, name: str | None) -> None:
    """A line per method over its shares: a loss, or without a name the recall."""
    for (method, at), look in zip(methods.items(), cycle(LOOKS), strict=False):
        points = sorted(
            (100 * each.seen_share, value) for each in at if each and (value := _value(each, name)) is not None
        )
        axes.plot([x for x, _ in points], [y for _, y in points], **look, markersize=5, label=method.name)


def _value(at: AtShare, name: str | None) -> float | None:
    if name is None:
        return None if at.hit_mass is None else 100 * at.hit_mass
    return at.losses[name].mean if name in at.losses else None
