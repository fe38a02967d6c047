"""Pictures of an evaluation, drawn from its rows. Each function returns None where no rows apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.lines import Line2D

from benchmarks.evaluation.contenders import budget_text
from benchmarks.evaluation.metrics import METRICS, PERPLEXITY, Metric
from benchmarks.evaluation.summary import FULL, SummaryRow
from benchmarks.harness.pictures import BLACK, LOOKS, LineLook
from policies.options import Budget
from runahead.picture_style import (
    INK,
    MUTED,
    ink_on,
    new_figure,
    panels,
    png,
    rows_and_columns,
    set_title,
    style_axes,
    tokens,
)

TITLES = {
    "perplexity": "Perplexity of text read in chunks",
    "copy": "Copy-NLL: the same passage again",
    "passkey": "Passkey found",
    "needle": "Needle found",
    "ruler": "RULER",
    "key_value": "Values found by their keys",
    "throughput": "Throughput at a fixed budget of K,V",
}
PYRAMID_FROM = ("copy", "needle", "passkey", "ruler", "key_value", "throughput", "perplexity")
"""Tasks in order of precedence for the picture of kept tokens per layer: the first one that was run is drawn, or a
task of a file if there is no other."""
MOST_LEGEND_COLUMNS = 4


def quality_png(rows: Sequence[SummaryRow], subject: str) -> bytes | None:
    """Draw every task's score over the KV cache bytes that a policy keeps: one panel per task, all policies in each."""
    if not rows:
        return None
    tasks = list(dict.fromkeys(row.task for row in rows))
    looks = _looks(rows)
    count_rows, count_columns = rows_and_columns(len(tasks), 3)
    figure = new_figure(max(6.4, 4.4 * count_columns), 1.5 + 3.5 * count_rows)
    for task, axes in zip(tasks, panels(figure, len(tasks), count_rows, count_columns), strict=True):
        of_task = [row for row in rows if row.task == task]
        for row in of_task:
            if row.policy == FULL:
                axes.axhline(row.score, color=MUTED, linewidth=1, linestyle="--")
                axes.plot([100 * row.kv_share], [row.score], color=BLACK, marker="o", markersize=6, linestyle="")
        for policy, look in looks.items():
            points = sorted((100 * row.kv_share, row.score) for row in of_task if row.policy == policy)
            if points:
                axes.plot(*zip(*points, strict=True), **look, markersize=6)
        metric = METRICS[of_task[0].metric]
        better = "lower is better" if metric.lower_is_better else "higher is better"
        x = "K,V kept on the device, % of the full cache's bytes"
        style_axes(axes, title=TITLES.get(task, task), x=x, y=f"{metric.name} ({better})")
        axes.set_xlim(0, max(105.0, 1.03 * max(100 * row.kv_share for row in of_task)))
        _set_scores(axes, metric, [row.score for row in of_task])
    _legend(figure, looks, with_full=any(row.policy == FULL for row in rows))
    set_title(figure, "What is lost, and what is saved", subject)
    return png(figure)


def found_png(task: str, rows: Sequence[SummaryRow], subject: str) -> bytes | None:
    """Draw heat maps of the share of facts found, over length and depth: a row per policy, a column per budget."""
    mapped = [row for row in rows if row.task == task and row.cells]
    if not mapped:
        return None
    lengths = sorted({length for row in mapped for length, _ in row.cells})
    depths = sorted({depth for row in mapped for _, depth in row.cells})
    policies = list(dict.fromkeys(row.policy for row in mapped))
    budgets = _budgets([row for row in mapped if row.budget is not None]) or [None]
    width, height = max(2.3, 0.5 * len(lengths) + 1.0), max(1.5, 0.3 * len(depths) + 0.95)
    figure = new_figure(max(6.4, width * len(budgets)), 1.2 + height * len(policies))
    places = panels(figure, len(policies) * len(budgets), len(policies), len(budgets))
    colours = matplotlib.colormaps["viridis"]
    taken = set()
    for row in mapped:
        column = 0 if row.budget is None else budgets.index(row.budget)
        place = policies.index(row.policy) * len(budgets) + column
        taken.add(place)
        axes = places[place]
        scores = [[row.cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        axes.imshow(scores, vmin=0, vmax=1, cmap=colours, aspect="auto")
        for y, line in enumerate(scores):
            for x, score in enumerate(line):
                if not math.isnan(score):
                    told = f"{100 * score:.0f}"
                    axes.text(x, y, told, ha="center", va="center", fontsize=8, color=ink_on(colours(score)))
        budget = "" if row.budget is None else f", {budget_text(row.budget)}"
        title = f"{row.policy}{budget}\nfound {row.score:.0%}, K,V {row.kv_share:.0%}"
        style_axes(axes, title=title, y="" if column else "depth", grid="")
        axes.title.set_fontsize(8.5)
        axes.set_xticks(range(len(lengths)), [tokens(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for place in set(range(len(places))) - taken:
        places[place].set_axis_off()
    set_title(figure, f"{TITLES[task]}, % by length in tokens and by depth", subject)
    return png(figure)


def pyramid_png(rows: Sequence[SummaryRow], subject: str) -> bytes | None:
    """Draw the tokens that each layer keeps, a panel per budget."""
    run = list(dict.fromkeys(row.task for row in rows))
    source = next((task for task in (*PYRAMID_FROM, *run) if task in run), None)
    thinned = [row for row in rows if row.task == source and row.policy != FULL and row.kept_shares]
    if source is None or not thinned:
        return None
    budgets = _budgets(thinned)
    looks = _looks(rows)
    count_rows, count_columns = rows_and_columns(len(budgets), 3)
    figure = new_figure(max(6.4, 4.2 * count_columns), 1.5 + 3.3 * count_rows)
    for budget, axes in zip(budgets, panels(figure, len(budgets), count_rows, count_columns), strict=True):
        for row in thinned:
            if row.budget == budget:
                percent = [100 * share for share in row.kept_shares]
                at = list(looks).index(row.policy)  # so that coinciding lines show all their markers
                every = (at, max(len(looks), 4))
                axes.plot(percent, **looks[row.policy], markevery=every, markersize=5, linewidth=1.4)
        title = "own budgets" if budget is None else f"budget {budget_text(budget)}"
        style_axes(axes, title=title, x="layer", y="tokens kept, % of the context")
        axes.set_ylim(0, 105)
        axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, {policy: look for policy, look in looks.items() if any(row.policy == policy for row in thinned)})
    set_title(figure, "What each layer keeps", f"{subject}; behind the contexts of {source}")
    return png(figure)


PICTURES: dict[str, Callable[[Sequence[SummaryRow], str], bytes | None]] = {
    "quality": quality_png,
    "passkey": partial(found_png, "passkey"),
    "needle": partial(found_png, "needle"),
    "pyramid": pyramid_png,
}


def _set_scores(axes: Any, metric: Metric, scores: Sequence[float]) -> None:
    if metric.is_share:
        axes.set_ylim(-0.05, 1.05)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif metric is PERPLEXITY and max(scores) > 4 * min(scores):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    elif metric is not PERPLEXITY:
        axes.set_ylim(0, 1.1 * max(scores))


def _legend(figure: Any, looks: dict[str, LineLook], *, with_full: bool = False) -> None:
    full: dict[str, LineLook] = {FULL: {"color": BLACK, "marker": "o", "linestyle": "--"}} if with_full else {}
    handles = [Line2D([], [], label=policy, **look) for policy, look in (full | looks).items()]
    ncols = min(MOST_LEGEND_COLUMNS, len(handles))
    figure.legend(handles=handles, loc="outside lower left", ncols=ncols, frameon=False, fontsize=9, labelcolor=INK)


def _looks(rows: Sequence[SummaryRow]) -> dict[str, LineLook]:
    """Looks of the policies that are compared with the full cache, the same in all pictures."""
    policies = dict.fromkeys(row.policy for row in rows if row.policy != FULL)
    return dict(zip(policies, cycle(LOOKS), strict=False))


def _budgets(rows: Sequence[SummaryRow]) -> list[Budget | None]:
    """Sort budgets: shares, then tokens, then None for policies with a budget of their own."""
    return sorted(
        {row.budget for row in rows}, key=lambda budget: (budget is None, isinstance(budget, int), budget or 0)
    )
