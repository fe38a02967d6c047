"""PyramidInfer's Table 3 and Fig. 8 as relations: the shape of the pyramid, and how many recent tokens vote.

    python -m benchmarks.studies.pyramid_relations --text book.txt --samples 16
    python -m benchmarks.studies.pyramid_relations --draw-only

A sample is a piece of the text: a passage, then other text. Behind the prompt, of which the policy chose what stays,
three things are measured without cutting back any more:

- perplexity of the text that follows, as in the paper;
- copy-NLL: the loss of the passage's second time, in nats per token, for which it has to be looked up;
- K,V bytes allocated, against all K,V.

Bounds come with them: the full cache, and a prompt without the passage ("unseen"). Appends a JSON line per sample and
policy to benchmarks/results/pyramid_relations.jsonl, leaving out those that are there already, draws
docs/pyramid_shape.png and docs/pyramid_recent_ratio.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.evaluation.tasks.base import nll_S
from benchmarks.harness import machine
from benchmarks.harness.machine import ROOT
from benchmarks.studies.pyramid_pictures import Line, draw, tables
from partitioner.table.fingerprint import now
from policies.pyramidinfer import PyramidInfer
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies

RESULTS = ROOT / "benchmarks" / "results" / "pyramid_relations.jsonl"
TEXT = ROOT / "examples" / "frankenstein_letters.txt"

SHAPES = ("power", "uniform", "more")
MEAN_KEEPS = (0.7, 0.8, 0.6)
RECENT_RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6)
FULL, UNSEEN = "full", "unseen"


def configurations() -> dict[str, dict[str, Any]]:
    """PyramidInfer's options by name; the bounds have none."""
    found: dict[str, dict[str, Any]] = {FULL: {}, UNSEEN: {}}
    given = [{"schedule": shape, "mean_keep": keep, "recent_ratio": 0.2} for keep in MEAN_KEEPS for shape in SHAPES]
    given += [{"schedule": "cosine", "recent_ratio": ratio} for ratio in (*RECENT_RATIOS, 0.8)]
    given += [{"schedule": "power", "mean_keep": 0.7, "recent_ratio": ratio} for ratio in RECENT_RATIOS]
    for options in given:
        found[" ".join(f"{name}={value}" for name, value in options.items())] = options
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=str(TEXT), help="a text file, or one that gzip packed")
    parser.add_argument("--samples", type=int, default=4, help="pieces of the text, apart from each other")
    parser.add_argument("--passage", type=int, default=128, help="tokens")
    parser.add_argument("--filler", type=int, default=640, help="tokens between the passage and its second time")
    parser.add_argument("--behind", type=int, default=128, help="tokens of the text that follows")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.draw_only:
        measure(options)
    lines = read()
    if not lines:
        raise SystemExit(f"{RESULTS.relative_to(ROOT)} has no lines yet; leave --draw-only out")
    draw(lines, ROOT / "docs")
    print(tables(lines))


def read() -> list[Line]:
    if not RESULTS.exists():
        return []
    return [json.loads(text) for text in RESULTS.read_text(encoding="utf-8").splitlines()]


def measure(options: argparse.Namespace) -> None:
    model = Model.load(ModelOptions(), torch.device("cpu"))
    lengths = options.passage, options.filler, options.behind
    about = {
        "text": Path(options.text).name,
        "passage": options.passage,
        "filler": options.filler,
        "behind": options.behind,
        "model": model.name,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "commit": machine.commit(),
        "code": machine.code(),
    }
    told_apart = ("text", "passage", "filler", "behind", "model", "start", "policy")
    done = {tuple(line[name] for name in told_apart) for line in read()}
    pieces = list(samples(model, Path(options.text), sum(lengths), options.samples))
    wanted = [(start, ids, name) for start, ids in pieces for name in configurations()]
    for start, ids_S, name in tqdm(wanted, unit="run", disable=None):
        line = about | {"start": start, "policy": name, "date": now()}
        if tuple(line[each] for each in told_apart) in done:
            continue
        line |= run(model, ids_S, options.passage, options.filler, name)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def samples(model: Model, path: Path, length: int, number: int) -> Iterator[tuple[int, Tensor]]:
    """Pieces of a text (start, token ids), spread over it.

    Raises:
        SystemExit: it is too short.
    """
    assert model.tokenizer is not None
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        ids = model.tokenizer(file.read(), verbose=False).input_ids
    if len(ids) < number * length:
        raise SystemExit(
            f"--text={path} has {len(ids)} tokens, but {number} samples need {number * length}; use a longer text or "
            f"--samples={len(ids) // length}"
        )
    for start in range(0, number * (len(ids) // number), len(ids) // number):
        yield start, torch.tensor(ids[start : start + length])


def run(model: Model, ids_S: Tensor, passage: int, filler: int, name: str) -> dict[str, Any]:
    """One sample under one policy."""
    options = configurations()[name]
    policies = RankPolicies(last=[PyramidInfer(**options)]) if options else RankPolicies()
    prompt_S = ids_S[passage if name == UNSEEN else 0 : passage + filler]
    kept = Conversation(model, policies)
    kept.feed(prompt_S[None])
    return {
        "options": options,
        "kv_bytes": kept.kv_bytes,
        "full_kv_bytes": kept.full_kv_bytes,
        "kept_tokens": kept.kept_tokens,
        "prompt_tokens": len(prompt_S),
        "copy_nll": nll_S(kept, ids_S[:passage].tolist()).mean().item(),
        "text_nll": nll_S(kept, ids_S[passage + filler :].tolist()).mean().item(),
    }


if __name__ == "__main__":
    main()
