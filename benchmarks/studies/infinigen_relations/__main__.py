"""InfiniGen's premises as relations: similar inputs of consecutive layers, and columns that distinguish scores.

    python -m benchmarks.studies.infinigen_relations --text book.txt --samples 4 --prompt 3840
    python -m benchmarks.studies.infinigen_relations --distances --text book.txt
    python -m benchmarks.studies.infinigen_relations --draw-only

A sample is a piece of the text: a prompt, and tokens after it whose attention to the prompt is measured. "Sample text"
is another text, from whose first tokens queries are collected offline. Measured are

- the cosine between inputs of consecutive layers, and between the outputs of their attention and FFN (paper, Table 1);
- the attention probability on the 5% of the prompt that partial keys select, over the share of columns (paper,
  Fig. 13), for several ways to choose a basis and columns;
- with --distances: the same for tokens at growing distances after the prompt.

Bounds come with them: the best selection ("oracle"), and selections by all columns. Appends a JSON line per sample to
benchmarks/results/infinigen_relations.jsonl, skipping those that are there already, draws
docs/studies/infinigen_columns.png and infinigen_similarity.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, GREEN, PURPLE, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.harness.text_table import Rows, markdown
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
    REFERENCES,
    SAMPLE_TURNED,
    VARIANTS,
    Setup,
    read,
)
from policies.skew import skew_of
from policies.skewing import Skew
from runahead import Model, ModelOptions
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
DISTANCES = (0, 256, 768, 1792)
"""Distances after the prompt in tokens; from each on, as many tokens are measured as the shortest window has."""
WINDOWS = (256, 1024, 2048)
CHUNK = 512
DRAWN = {
    OURS: ("the prompt's last queries, turned to behind it", ACCENT, "-"),
    SAMPLE_TURNED: ("another text's, turned to behind the prompt", GREEN, "-"),
    NONE: ("no skewing", INK, "-"),
    PAPER: ("another text's where they are, columns by |q| + |k|", BLUE, "--"),
    PROMPT_BY_SIZE: ("the prompt's last queries where they are, by |q| + |k|", PURPLE, "--"),
    HINDSIGHT: ("the queries that will ask", MUTED, ":"),
}
"""Label, colour and dashes of each variant."""
SIMILARITY = {"block input": INK, "attention input": ACCENT, "attention output": BLUE, "FFN output": GREEN}


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per sample of the text."""
    options = run.options
    model = Model.load(ModelOptions(), torch.device("cpu"))
    about = {
        "kind": "distance" if options.distances else "columns",
        "text": Path(options.text).name,
        "sample_text": Path(options.sample_text).name,
        "sample_tokens": options.sample_tokens,
        "prompt": options.prompt,
        "behind": DISTANCES[-1] + WINDOWS[0] if options.distances else options.behind,
        "share": options.share,
        "model": model.name,
    }
    sample_ids, ids = text_ids(model, options.sample_text), text_ids(model, options.text)
    if len(sample_ids) < options.sample_tokens:
        raise SystemExit(f"--sample-text={options.sample_text} has {len(sample_ids)} tokens; use a longer one")
    skip = options.sample_tokens if options.text == options.sample_text else 0
    length, name = options.prompt + about["behind"], f"--text={options.text}"
    pieces = list(samples(ids[skip:], options.samples, length, option=name))
    skews: dict[str, Skew] = {}
    for name, rotaries in {"sample": None, "sample turned": model.rotaries}.items():
        if not options.distances:
            skews[name] = skew_of(model, sample_ids[: options.sample_tokens], rotaries=rotaries, chunk=CHUNK)
    for first, piece in run.bar(pieces, "sample"):
        line = about | {"start": skip + first}
        if not run.has(line):
            ids_S = torch.tensor(piece)
            yield line | (
                by_distance(model, ids_S, options) if options.distances else by_ratio(model, ids_S, options, skews)
            )


def by_ratio(
    model: Model, ids_S: torch.Tensor, options: argparse.Namespace, samples: dict[str, Skew]
) -> dict[str, Any]:
    """Masses by reference, and by variant and ratio; similarities by layer."""
    setup = Setup(prompt_tokens=options.prompt, ratios=RATIOS, samples=samples, share=options.share, every=16)
    reading = read(model, ids_S, setup)
    mass: dict[str, Any] = {name: reading.mean_mass(name) for name in REFERENCES}
    for variant in VARIANTS:
        mass[variant.name] = {str(ratio): reading.mean_mass(variant.name, ratio) for ratio in RATIOS}
    return {"mass": mass, "similarity": reading.similarity}


def by_distance(model: Model, ids_S: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Masses by distance: of references, and by variant, window and ratio."""
    fixed = Setup(prompt_tokens=options.prompt, ratios=RATIOS, variants=[OURS], share=options.share, every=16)
    mass: dict[str, Any] = {}
    for first in DISTANCES:
        at = mass[str(first)] = {}
        setups = {f"window of {length}": replace(fixed, window=range(length)) for length in WINDOWS}
        made_anew = range(first, first + WINDOWS[0])
        setups["made anew"] = replace(fixed, window=made_anew, variants=[NONE, HINDSIGHT, OURS])
        for label, setup in setups.items():
            end = options.prompt + first + WINDOWS[0]
            reading = read(model, ids_S[:end], replace(setup, first_asking=first))
            at |= {name: reading.mean_mass(name) for name in REFERENCES}
            for variant in setup.variants:
                name = f"{variant.name}, {label}" if variant == OURS else variant.name
                at[name] = {str(ratio): reading.mean_mass(variant.name, ratio) for ratio in RATIOS}
    return {"mass": mass}


def groups(lines: Sequence[Line], kind: str) -> list[list[Line]]:
    """Group lines that differ only in where their sample begins, ordered by prompt length."""

    def about(line: Line) -> tuple[Any, ...]:
        return line["prompt"], line["text"], line["share"], line["model"]

    found = sorted((line for line in lines if line["kind"] == kind), key=about)
    return [list(group) for _, group in groupby(found, key=about)]


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
    legend(figure, handles=handles, labels=labels, loc="outside lower left", ncols=2, fontsize=8)
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
    legend(axes, loc="lower right", ncols=2, fontsize=8)
    set_title(figure, "How alike consecutive layers are", f"{group[0]['model']}, {subject(group)}")
    return png(figure)


def tables(lines: Sequence[Line]) -> str:
    """Format all measurements as Markdown tables."""
    text = ""
    for group in groups(lines, "columns"):
        shares = ratios(group)
        rows: Rows = [("columns", *(f"{ratio:.0%}" for ratio in shares))]
        rows += [(each.name, *(f"{mass(group, each.name, ratio):.3f}" for ratio in shares)) for each in VARIANTS]
        names = (ORACLE, OWN_INPUT, ALL_COLUMNS, NORMED_BEFORE)
        cosines = {what: mean(x for line in group for x in line["similarity"][what][2:]) for what in SIMILARITY}
        text += f"{subject(group)}\n\n{markdown(rows, right=False)}\n"
        text += ", ".join(f"{name} {mass(group, name):.3f}" for name in names) + "\n\n"
        text += "cosines from layer 3 on: " + ", ".join(f"{what} {x:.2f}" for what, x in cosines.items()) + "\n\n"
    for group in groups(lines, "distance"):
        distances = group[0]["mass"]
        variants = [name for name, values in distances["0"].items() if isinstance(values, dict)]
        rows = [("tokens behind the prompt", ALL_COLUMNS, *variants)]
        for at in sorted(distances, key=int):
            cells = [" / ".join(f"{mass(group, name, ratio, at=at):.3f}" for ratio in (0.2, 0.3)) for name in variants]
            rows.append((f"{at} to {int(at) + 256}", f"{mass(group, ALL_COLUMNS, at=at):.3f}", *cells))
        text += f"{subject(group)}\n\n{markdown(rows, right=False)}\n"
    return text


STUDY = Study(
    name="infinigen_relations",
    text=__doc__,
    has="mass",
    measure=measure,
    table=tables,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "sample-text": option(EXAMPLE, "text from which queries are collected offline"),
        "sample-tokens": option(2048),
        "samples": option(1, "pieces of the text, spread over it"),
        "prompt": option(2048, "tokens"),
        "behind": option(256, "tokens after the prompt, of which every 16th asks"),
        "share": option(0.05, "share of the prompt's tokens that is fetched"),
        "distances": option(False, "ask far after the prompt too"),
    },
    pictures={"infinigen_columns.png": columns_png, "infinigen_similarity.png": similarity_png},
    key=("kind", "text", "sample_text", "sample_tokens", "prompt", "behind", "share", "model", "start"),
)

if __name__ == "__main__":
    STUDY.main()
