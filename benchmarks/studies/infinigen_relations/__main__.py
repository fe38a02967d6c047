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
docs/infinigen_columns.png and docs/infinigen_similarity.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.studies.infinigen_relations.mass import HINDSIGHT, NONE, OURS, REFERENCES, VARIANTS, read
from benchmarks.studies.infinigen_relations.pictures import columns_png, similarity_png, tables
from policies.skew import skew_of
from policies.skewing import Skew
from runahead import Model, ModelOptions

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
DISTANCES = (0, 256, 768, 1792)
"""Distances after the prompt in tokens; from each on, as many tokens are measured as the shortest window has."""
WINDOWS = (256, 1024, 2048)
CHUNK = 512


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
    reading = read(
        model, ids_S, prompt_tokens=options.prompt, samples=samples, ratios=RATIOS, share=options.share, every=16
    )
    mass: dict[str, Any] = {name: reading.mean_mass(name) for name in REFERENCES}
    for variant in VARIANTS:
        mass[variant.name] = {str(ratio): reading.mean_mass(variant.name, ratio) for ratio in RATIOS}
    return {"mass": mass, "similarity": reading.similarity}


def by_distance(model: Model, ids_S: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Masses by distance: of references, and by variant, window and ratio."""
    mass: dict[str, Any] = {}
    for first in DISTANCES:
        at = mass.setdefault(str(first), {})
        windows = {f"window of {length}": range(length) for length in WINDOWS}
        windows["made anew"] = range(first, first + WINDOWS[0])
        for label, window in windows.items():
            variants = (NONE, HINDSIGHT, OURS) if label == "made anew" else (OURS,)
            reading = read(
                model,
                ids_S[: options.prompt + first + WINDOWS[0]],
                prompt_tokens=options.prompt,
                samples={},
                variants=variants,
                ratios=RATIOS,
                share=options.share,
                every=16,
                window=window,
                first_asking=first,
            )
            at |= {name: reading.mean_mass(name) for name in REFERENCES}
            for variant in variants:
                name = f"{variant.name}, {label}" if variant == OURS else variant.name
                at[name] = {str(ratio): reading.mean_mass(variant.name, ratio) for ratio in RATIOS}
    return {"mass": mass}


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
