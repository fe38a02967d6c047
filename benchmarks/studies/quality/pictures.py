"""Picture of docs/studies/quality.md: what policies lose by what they keep and by what attention saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any

from benchmarks.evaluation.difference import Difference
from benchmarks.evaluation.summary import FULL
from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import LOOKS, legend
from benchmarks.studies.quality.paired import PolicyRow, Setting, rows, settings
from benchmarks.studies.quality.tables import PROTOCOLS
from runahead.picture_style import MUTED, new_figure, panels, png, set_title, style_axes

ALIKE = 2
"""Percentage points between the bytes kept and what attention saw at most for one picture of both."""

Value = Callable[[PolicyRow], float]


def picture(found: list[Line]) -> bytes | None:
    """Draw the setting with the most questions; None if no policy was compared with the full cache."""
    compared: dict[Setting, list[PolicyRow]] = {
        setting: made for setting, group in settings(found).items() if len(made := rows(group)) > 1
    }
    if not compared:
        return None
    (model, protocol, length), made = max(compared.items(), key=lambda each: sum(row.pairs for row in each[1]))
    ways = [(kept, "bytes kept")]
    if any(abs(kept(row) - seen(row)) > ALIKE for row in made):
        ways.append((seen, "attention saw"))
    figure = new_figure(11.5, 1.1 + 3.8 * len(ways))
    axes = panels(figure, 2 * len(ways), len(ways), 2)
    losses = ((score, "score over full cache, points"), (loss, "loss over full, nats"))
    for place, ((y, y_name), (x, x_name)) in zip(axes, product(losses, ways), strict=True):
        _draw(place, made, x, y)
        style_axes(place, x=f"{x_name}, % of the full cache", y=y_name)
    legend(figure, handles=axes[0].get_legend_handles_labels()[0], loc="outside lower left", ncols=5)
    subject = f"{model}, {PROTOCOLS[protocol]}, {length}; bars: 95% of the mean paired difference"
    seen_too = " and by what attention saw" if len(ways) > 1 else ""
    set_title(figure, f"What policies lose, by what they keep{seen_too}", subject)
    return png(figure)


def kept(row: PolicyRow) -> float:
    return 100 * row.kept_share


def seen(row: PolicyRow) -> float:
    return 100 * row.seen_share


def score(row: PolicyRow) -> Difference:
    """Score over the full cache in percentage points."""
    interval = row.score.interval
    in_points = None if interval is None else (100 * interval[0], 100 * interval[1])
    return Difference(mean=100 * row.score.mean, interval=in_points)


def loss(row: PolicyRow) -> Difference | None:
    return row.loss


def _draw(axes: Any, made: Sequence[PolicyRow], x: Value, y: Callable[[PolicyRow], Difference | None]) -> None:
    """Draw a line per policy, over its budgets, with the interval of each point."""
    policies = list(dict.fromkeys(row.policy for row in made if row.policy != FULL))
    axes.axhline(0, color=MUTED, linewidth=1, linestyle="--", label="full cache")
    for policy, look in zip(policies, cycle(LOOKS), strict=False):
        of_policy = [(x(row), value) for row in made if row.policy == policy and (value := y(row)) is not None]
        points = sorted(of_policy, key=lambda point: point[0])
        axes.plot([at for at, _ in points], [value.mean for _, value in points], **look, markersize=5, label=policy)
        for at, value in points:
            if value.interval is not None:
                axes.plot([at, at], list(value.interval), color=look["color"], linewidth=0.9, alpha=0.6)
    axes.set_xlim(left=0)
