"""What InfiniGen rests on, as relations: similar inputs of consecutive layers, and columns that tell scores apart.

    python -m benchmarks.studies.infinigen_relations --text book.txt --samples 4 --prompt 3840
    python -m benchmarks.studies.infinigen_relations --distances --text book.txt
    python -m benchmarks.studies.infinigen_relations --draw-only

A sample is a piece of the text: a prompt, and tokens behind it that ask what of it they attend to. "Sample text" is
another text, whose first tokens queries are collected from offline. Measured are

- the cosine between inputs of consecutive layers, and between what their attention and FFN add (the paper's Table 1);
- the attention probability on the 5% of the prompt that partial keys choose, over the share of columns (as Fig. 13),
  for several ways to choose a basis and columns;
- with --distances: the same for tokens further and further behind the prompt.

Bounds come with them: the best choice ("oracle"), and choices by all columns. Appends a JSON line per sample to
benchmarks/results/infinigen_relations.jsonl, leaving out those that are there already, draws
docs/infinigen_columns.png and docs/infinigen_similarity.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

import argparse
import gzip
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.machine import ROOT
from benchmarks.studies.infinigen_mass import HINDSIGHT, NONE, OURS, REFERENCES, VARIANTS, read
from benchmarks.studies.infinigen_pictures import draw, tables
from partitioner.table.fingerprint import now
from policies.skew import skew_of
from policies.skewing import Skew
from runahead import Model, ModelOptions

RESULTS = ROOT / "benchmarks" / "results" / "infinigen_relations.jsonl"
EXAMPLE = ROOT / "examples" / "frankenstein_letters.txt"
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
DISTANCES = (0, 256, 768, 1792)
"""Tokens behind the prompt from which on as many ask as the shortest window has."""
WINDOWS = (256, 1024, 2048)
CHUNK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=str(EXAMPLE), help="a text file, or one that gzip packed")
    parser.add_argument("--sample-text", default=str(EXAMPLE), help="what queries are collected from offline")
    parser.add_argument("--sample-tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1, help="pieces of the text, apart from each other")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--behind", type=int, default=256, help="tokens behind it, of which every 16th asks")
    parser.add_argument("--share", type=float, default=0.05, help="of the prompt's tokens that are fetched")
    parser.add_argument("--distances", action="store_true", help="ask far behind the prompt too")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.draw_only:
        measure(options)
    found = lines.read(RESULTS, option="results", kind="mass")
    if not found:
        raise SystemExit(f"{RESULTS.relative_to(ROOT)} has no lines yet; leave --draw-only out")
    draw(found, ROOT / "docs")
    print(tables(found))


def measure(options: argparse.Namespace) -> None:
    model = Model.load(ModelOptions(), torch.device("cpu"))
    kind = "distance" if options.distances else "columns"
    behind = DISTANCES[-1] + WINDOWS[0] if options.distances else options.behind
    about = {
        "kind": kind,
        "text": Path(options.text).name,
        "sample_text": Path(options.sample_text).name,
        "sample_tokens": options.sample_tokens,
        "prompt": options.prompt,
        "behind": behind,
        "share": options.share,
        "model": model.name,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "commit": machine.commit(),
        "code": machine.code(),
    }
    told_apart = (*list(about)[: list(about).index("versions")], "start")
    done = {tuple(line[name] for name in told_apart) for line in lines.read(RESULTS, option="results", kind="mass")}
    sample_ids, ids = token_ids(model, options.sample_text), token_ids(model, options.text)
    skip = options.sample_tokens if options.text == options.sample_text else 0
    length = options.prompt + behind
    if len(sample_ids) < options.sample_tokens:
        raise SystemExit(f"--sample-text={options.sample_text} has {len(sample_ids)} tokens; use a longer one")
    if len(ids) < skip + options.samples * length:
        raise SystemExit(
            f"--text={options.text} has {len(ids) - skip} tokens, but {options.samples} samples need "
            f"{options.samples * length}; use a longer text, or fewer samples"
        )
    samples: dict[str, Skew] = {}
    for name, rotaries in {"sample": None, "sample turned": model.rotaries}.items():
        if not options.distances:
            samples[name] = skew_of(model, sample_ids[: options.sample_tokens], rotaries=rotaries, chunk=CHUNK)
    apart = (len(ids) - skip) // options.samples
    for start in tqdm(range(skip, skip + options.samples * apart, apart), unit="sample", disable=None):
        line = about | {"start": start, "date": now()}
        if tuple(line[name] for name in told_apart) in done:
            continue
        piece = torch.tensor(ids[start : start + length])
        found = by_distance(model, piece, options) if options.distances else by_ratio(model, piece, options, samples)
        lines.append(RESULTS, [line | found])


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


def token_ids(model: Model, path: str) -> list[int]:
    assert model.tokenizer is not None
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        ids: list[int] = model.tokenizer(file.read(), verbose=False).input_ids
    return ids


if __name__ == "__main__":
    main()
