"""Picture of a plan: TTFT of every mesh that fits and what it is spent with, and the memory of its fullest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runahead.picture_style import ACCENT, INK, MUTED, colours, new_figure, panels, png, seconds, set_title, style_axes

SPENT = {"compute": "compute", "allreduce": "all-reduces", "wait": "waits for keys and values"}
HELD = {"weights": "weights", "kv": "keys and values", "activations": "activations", "reserve": "reserve"}


def plan_png(plan: Mapping[str, Any]) -> bytes:
    """Draw a bar per candidate in both panels, the best at the top.

    Args:
        plan: as `partitioner.meshes.text.as_json` gives it.
    """
    candidates = plan["candidates"]
    figure = new_figure(11.5, 1.9 + 0.3 * len(candidates))
    left, right = panels(figure, 2, 1, 2)
    names = [f"{each['stages']} x {each['shares']}, {each['decode']}" for each in candidates]
    _draw(left, names, "TTFT, seconds", SPENT, [each["ttft_parts_s"] for each in candidates])
    for at, each in enumerate(candidates):
        total_s = each["ttft_s"]
        text, place, ink = (" does not fit", 0.0, MUTED) if total_s is None else (f" {seconds(total_s)}", total_s, INK)
        left.annotate(text, (place, at), va="center", fontsize=8, color=ink)
    left.margins(x=0.15)
    fullest = [max(each["memory"], key=lambda rank: rank["total"]) for each in candidates]
    _draw(right, names, "memory of the fullest rank, GiB", HELD, fullest, unit=2**30)
    right.axvline(plan["device"]["memory_bytes"] / 2**30, color=ACCENT, linewidth=1.2)
    set_title(figure, "Stages x shares, the best first", _subject(plan))
    return png(figure)


def _draw(
    axes: Any, names: Sequence[str], x: str, parts: Mapping[str, str], values: Sequence[Any], *, unit: float = 1.0
) -> None:
    """Draw bars of stacked parts; a value that is None has no bar."""
    starts = [0.0] * len(values)
    for (name, label), colour in zip(parts.items(), colours(len(parts)), strict=True):
        widths = [0.0 if value is None else value[name] / unit for value in values]
        axes.barh(range(len(values)), widths, left=starts, height=0.7, color=colour, label=label)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    style_axes(axes, x=x, grid="x")
    axes.set_yticks(range(len(values)), names)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="best")


def _subject(plan: Mapping[str, Any]) -> str:
    model, nodes = plan["model"], plan["nodes"]
    place = f"{plan['gpus']} x {plan['device']['name']}" + (f" in {nodes} nodes" if nodes > 1 else "")
    size = f"{model['num_layers']} layers, {model['model_dim']:,} wide, {model['dtype']}"
    return f"{plan['tokens']:,} tokens; {model['type']}, {size}; {place}"
