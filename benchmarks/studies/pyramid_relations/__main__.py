"""PyramidInfer's Table 3 and Fig. 8 as relations: the shape of the pyramid, and the number of recent tokens that vote.

    python -m benchmarks.studies.pyramid_relations --text book.txt --samples 16
    python -m benchmarks.studies.pyramid_relations --draw-only

A sample is a piece of the text: a passage, then other text. After the prompt, of which the policy kept some tokens,
three quantities are measured without evicting any more:

- perplexity of the text that follows, as in the paper;
- copy-NLL: the loss of the repeated passage in nats per token, which requires looking it up;
- KV cache bytes allocated, against those of the full cache.

Bounds come with them: the full cache, and a prompt without the passage ("unseen"). Appends a JSON line per sample and
policy to benchmarks/results/pyramid_relations.jsonl, skipping those that are there already, draws
docs/pyramid_shape.png and docs/pyramid_recent_ratio.png from these lines alone, and prints them as tables.
"""

# Legend: S tokens.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.evaluation.tasks.base import nll_S
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.studies.pyramid_relations.pictures import recent_ratio_png, shape_png, tables
from policies.pyramidinfer import PyramidInfer
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies

SHAPES = ("power", "uniform", "more")
MEAN_KEEPS = (0.7, 0.8, 0.6)
RECENT_RATIOS = (0.05, 0.1, 0.2, 0.4, 0.6)
FULL, UNSEEN = "full", "unseen"


def configurations() -> dict[str, dict[str, Any]]:
    """PyramidInfer's options by name; empty for the bounds."""
    found: dict[str, dict[str, Any]] = {FULL: {}, UNSEEN: {}}
    given = [{"schedule": shape, "mean_keep": keep, "recent_ratio": 0.2} for keep in MEAN_KEEPS for shape in SHAPES]
    given += [{"schedule": "cosine", "recent_ratio": ratio} for ratio in (*RECENT_RATIOS, 0.8)]
    given += [{"schedule": "power", "mean_keep": 0.7, "recent_ratio": ratio} for ratio in RECENT_RATIOS]
    for options in given:
        found[" ".join(f"{name}={value}" for name, value in options.items())] = options
    return found


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per sample of the text and policy."""
    options = run.options
    model = Model.load(ModelOptions(), torch.device("cpu"))
    about = {
        "text": Path(options.text).name,
        "passage": options.passage,
        "filler": options.filler,
        "behind": options.behind,
        "model": model.name,
    }
    length, ids = options.passage + options.filler + options.behind, text_ids(model, options.text)
    pieces = samples(ids, options.samples, length, option=f"--text={options.text}")
    wanted = [(start, torch.tensor(piece), name) for start, piece in pieces for name in configurations()]
    for start, ids_S, name in run.bar(wanted, "run"):
        line = about | {"start": start, "policy": name}
        if not run.has(line):
            yield line | scores(model, ids_S, options.passage, options.filler, name)


def scores(model: Model, ids_S: Tensor, passage: int, filler: int, name: str) -> dict[str, Any]:
    """Measure one sample under one policy."""
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


STUDY = Study(
    name="pyramid_relations",
    text=__doc__,
    has="policy",
    measure=measure,
    table=tables,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "samples": option(4, "pieces of the text, spread over it"),
        "passage": option(128, "tokens"),
        "filler": option(640, "tokens between the passage and its second occurrence"),
        "behind": option(128, "tokens of the text that follows"),
    },
    pictures={"pyramid_shape.png": shape_png, "pyramid_recent_ratio.png": recent_ratio_png},
    key=("text", "passage", "filler", "behind", "model", "start", "policy"),
)

if __name__ == "__main__":
    STUDY.main()
