"""Pictures and tables of InfiniGen's relations, from their lines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.harness.lines import Line
from benchmarks.studies.infinigen_relations.mass import (
    ALL_COLUMNS,
    HINDSIGHT,
    NONE,
    NORMED_BEFORE,
    ORACLE,
    OURS,
    OWN_INPUT,
    PAPER,
    PROMPT_BY_SIZE,
    SAMPLE_TURNED,
    VARIANTS,
)
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title

TOLD_APART = ("kind", "text", "prompt", "share", "model")
DRAWN = {
    OURS: ("the prompt's last queries, turned to behind it", ACCENT, "-"),
    SAMPLE_TURNED: ("another text's, turned to behind the prompt", "#009e73", "-"),
    NONE: ("no skewing", INK, "-"),
    PAPER: ("another text's where they are, columns by |q| + |k|", "#0072b2", "--"),
    PROMPT_BY_SIZE: ("the prompt's last queries where they are, by |q| + |k|", "#cc79a7", "--"),
    HINDSIGHT: ("the queries that will ask", MUTED, ":"),
}
"""Label, colour and dashes of each variant."""
SIMILARITY = {"block input": INK, "attention input": ACCENT, "attention output": "#0072b2", "FFN output": "#009e73"}


def groups(lines: Sequence[Line], kind: str) -> list[list[Line]]:
    """Group lines that differ only in where their sample begins, ordered by prompt length."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["kind"] == kind:
            found.setdefault(tuple(line[name] for name in TOLD_APART), []).append(line)
    return sorted(found.values(), key=lambda group: (group[0]["prompt"], group[0]["text"]))


def mass(group: Sequence[Line], name: str, ratio: float | None = None, at: str | None = None) -> float:
    """Mean mass over a group's lines; at distance `at` if given."""
    found = [line["mass"] if at is None else line["mass"][at] for line in group]
    return mean(float(each[name] if ratio is None else each[name][str(ratio)]) for each in found)


def ratios(group: Sequence[Line]) -> list[float]:
    return sorted(float(ratio) for ratio in group[0]["mass"][OURS.name])


def subject(group: Sequence[Line]) -> str:
    line = group[0]
    count = f"{len(group)} sample{'s' if len(group) > 1 else ''}"
    return f"{line['text']}, {count}, prompt {line['prompt']:,} tokens"


def columns_png(lines: Sequence[Line]) -> bytes | None:
    """Draw mass over the share of columns, a panel per text and length."""
    found = groups(lines, "columns")
    if not found:
        return None
    figure = new_figure(4.6 * len(found) + 0.6, 4.6)
    several_texts = len({group[0]["text"] for group in found}) > 1
    for axes, group in zip(panels(figure, len(found), 1, len(found)), found, strict=True):
        shares = ratios(group)
        for variant, (label, colour, dashes) in DRAWN.items():
            values = [mass(group, variant.name, ratio) for ratio in shares]
            axes.plot(shares, values, color=colour, linestyle=dashes, marker="o", markersize=3.5, label=label)
        axes.axhline(mass(group, ALL_COLUMNS), color=MUTED, linewidth=1, label="all columns")
        axes.axhline(mass(group, ORACLE), color=MUTED, linewidth=1, linestyle=(0, (1, 2)), label="best choice")
        title = subject(group) if several_texts else subject(group).partition(", ")[2]
        dress(axes, title=title, x="share of columns", y="attention probability fetched")
        axes.set_xlim(0, max(shares) + 0.02)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK}
    figure.legend(handles, labels, loc="outside lower left", ncols=2, **look)
    line = found[0][0]
    about = f"{line['model']}, {'' if several_texts else line['text'] + ', '}{line['share']:.0%} of the prompt fetched"
    set_title(figure, "Which columns of the keys to keep", about)
    return png(figure)


def similarity_png(lines: Sequence[Line]) -> bytes | None:
    """Draw cosines over layers, for the longest prompt."""
    found = groups(lines, "columns")
    if not found:
        return None
    group = found[-1]
    figure = new_figure(6.4, 3.6)
    [axes] = panels(figure, 1, 1, 1)
    for what, colour in SIMILARITY.items():
        by_layer = [mean(values) for values in zip(*(line["similarity"][what] for line in group), strict=True)]
        axes.plot(range(1, len(by_layer) + 1), by_layer, color=colour, marker="o", markersize=3, label=what)
    dress(axes, x="layer", y="cosine with the layer before")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right", ncols=2)
    set_title(figure, "How alike consecutive layers are", f"{group[0]['model']}, {subject(group)}")
    return png(figure)


def tables(lines: Sequence[Line]) -> str:
    """Format all measurements as Markdown tables."""
    rows = []
    for group in groups(lines, "columns"):
        shares = ratios(group)
        rows += [subject(group), "", "| columns | " + " | ".join(f"{ratio:.0%}" for ratio in shares) + " |"]
        rows.append("|---" * (1 + len(shares)) + "|")
        for variant in VARIANTS:
            values = " | ".join(f"{mass(group, variant.name, ratio):.3f}" for ratio in shares)
            rows.append(f"| {variant.name} | {values} |")
        rows += ["", ", ".join(f"{name} {mass(group, name):.3f}" for name in (ORACLE, OWN_INPUT, ALL_COLUMNS)), ""]
        rows[-2] += f", {NORMED_BEFORE} {mass(group, NORMED_BEFORE):.3f}"
        cosines = {what: mean(x for line in group for x in line["similarity"][what][2:]) for what in SIMILARITY}
        rows += ["cosines from layer 3 on: " + ", ".join(f"{what} {x:.2f}" for what, x in cosines.items()), ""]
    for group in groups(lines, "distance"):
        names = [name for name, values in group[0]["mass"]["0"].items() if isinstance(values, dict)]
        rows += [subject(group), "", "| tokens behind the prompt | " + " | ".join([ALL_COLUMNS, *names]) + " |"]
        rows.append("|---" * (2 + len(names)) + "|")
        for at in sorted(group[0]["mass"], key=int):
            cells = [f"{mass(group, ALL_COLUMNS, at=at):.3f}"]
            cells += [" / ".join(f"{mass(group, name, ratio, at=at):.3f}" for ratio in (0.2, 0.3)) for name in names]
            rows.append(f"| {at} to {int(at) + 256} | " + " | ".join(cells) + " |")
        rows.append("")
    return "\n".join(rows)
