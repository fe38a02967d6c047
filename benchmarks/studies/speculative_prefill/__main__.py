"""How much sooner is the first token if a draft chooses a quarter of the prompt, and what does that lose?

    python -m benchmarks.studies.speculative_prefill
    python -m benchmarks.studies.speculative_prefill --measures loss --ways exact pyramidinfer layers=3 layers=5

Time: two ranks of one thread prefill a text as all ways in turn (A B C, C B A, ...), after prompts from which
partition=auto learns. Loss: of a passage of 64 tokens that comes again after the text, and of the 64 tokens that really
follow it, with what each way keeps; samples are spread over the text. A speculative prefill keeps fewer tokens in all
layers, PyramidInfer (mean_keep, half of it recent) and SnapKV (budget) on average over layers. Times need two cores
that are otherwise idle. Appends JSON lines to benchmarks/results/speculative_prefill.jsonl.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.harness.lines import Line, measured
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, newest, option
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.commits.job import RankPair
from benchmarks.studies.speculative_prefill.losses import Losses
from benchmarks.studies.speculative_prefill.ways import EXACT, LAYERS, policies_of
from runahead import Model, ModelOptions, Ranks
from runahead.config import RanksOptions

HEADINGS = ("way", "tokens", "kept", "TTFT, s", "of it the draft", "times as fast", "copy-NLL", "following", "n")
RANK = Path("benchmarks/studies/speculative_prefill/rank.py")


def variants(options: Namespace) -> Iterator[Variant]:
    """Time and loss at each length. Raises: ValueError: there is no such way."""
    for way in options.ways:
        policies_of(way, options.share)
    for length in options.lengths:
        for what in options.measures:
            yield {"measured": what, "length": length, "share": options.share}


def model_of(options: Namespace) -> dict[str, Any]:
    """Options of the model."""
    return {"name": "smollm2"} if options.model is None else {"name": "hf", "path": options.model}


@contextmanager
def ranks_of(options: Namespace) -> Iterator[RankPair]:
    """Two ranks with the model and the text."""
    job = RankPair(ROOT, program=RANK)
    try:
        text = Path(options.text).read_text(encoding="utf-8")
        num_tokens = job.ask({"open": model_of(options), "text": text, "share": options.share})
        if num_tokens < max(options.lengths):
            raise ValueError(f"--text has {num_tokens:,} tokens, and {max(options.lengths):,} are needed")
        yield job
        job.close()
    finally:
        job.kill()


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """A line for each way, and of losses for each sample."""
    with errors_in_one_line():
        yield from _times(options, variant) if variant["measured"] == "time" else _losses(options, variant)


def _times(options: Namespace, variant: Variant) -> Iterator[Line]:
    length = variant["length"]
    with ranks_of(options) as job:

        def prefill(way: str, _: int) -> Any:
            return job.ask({"way": way, "tokens": length})

        turns = {way: partial(prefill, way) for way in options.ways}
        found = in_turn(turns, options.rounds, warmup=options.warmup, label=f"{length:,} tokens")
    for way, runs in found.items():
        yield variant | {
            "way": way,
            "ttft_s": [each["ttft_s"] for each in runs],
            "draft_s": [each["draft_s"] for each in runs],
            "boundaries": runs[-1]["boundaries"],
        }


def _losses(options: Namespace, variant: Variant) -> Iterator[Line]:
    text = Path(options.text).read_text(encoding="utf-8")
    with Ranks.start(RanksOptions(threads=options.threads)) as ranks:
        model = Model.load(ModelOptions(**model_of(options)), torch.device("cpu"))
        losses = Losses(model, ranks, text, options.share, variant["length"], options.samples)
        for way in options.ways:
            for each in losses.of(way):
                yield variant | {"way": way, "model": model.name, **each}


def table(found: list[Line]) -> str:
    """The newest lines: a row for each length, share and way."""
    times = {(line["length"], line["share"], line["way"]): line for line in found if line["measured"] == "time"}
    of_losses = [line for line in found if line["measured"] == "loss"]
    losses: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in newest("length", "share", "way", "sample")(of_losses):
        losses.setdefault((line["length"], line["share"], line["way"]), {})[line["sample"]] = line
    rows: Rows = [HEADINGS]
    for key in sorted(dict.fromkeys([*times, *losses]), key=lambda key: (*key[:2], key[2].startswith(LAYERS), key[2])):
        length, share, way = key
        exact = length, share, EXACT
        cells = [f"`{way}`", f"{length:,}", "all" if way == EXACT else f"{share:.0%}"]
        cells += _cells_of_times(times.get(key), times.get(exact))
        own, full = losses.get(key, {}), losses.get(exact, {})
        common = sorted(own.keys() & full.keys())
        for name in ("copy_nll", "following_nll"):
            base = [full[each][name] for each in common]
            more = [own[each][name] - full[each][name] for each in common]
            cells.append("-" if not common else f"{mean(base):.2f}" if way == EXACT else f"{mean(more):+.2f}")
        rows.append((*cells, str(len(common))))
    return f"{markdown(rows)}\n{measured(found)}"


def _cells_of_times(own: Line | None, exact: Line | None) -> list[str]:
    """TTFT of a way, the draft's part of it, and how many times as fast it is as the exact prefill of the round."""
    if own is None:
        return ["-"] * 3
    drafts = [each for each in own["draft_s"] if each is not None]
    pairs = [] if exact is None else list(zip(exact["ttft_s"], own["ttft_s"], strict=False))
    return [
        f"{median(own['ttft_s']):.2f}",
        f"{median(drafts):.2f}" if drafts else "-",
        f"{median(one / two for one, two in pairs):.2f}" if pairs else "-",
    ]


STUDY = Study(
    name="speculative_prefill",
    text=__doc__,
    has="measured",
    variants=variants,
    measure=measure,
    table=table,
    page="speculative_prefill.md",
    options={
        "measures": option(["time", "loss"], "what is measured", choices=["time", "loss"]),
        "ways": option([EXACT, "pyramidinfer", "snapkv", "layers=5"], "exact, pyramidinfer, snapkv, layers=<number>"),
        "lengths": option([4096], "tokens of the prompts"),
        "share": option(0.25, "of the prompt that is kept"),
        "rounds": option(4, "prompts of each way that count"),
        "warmup": option(3, "prompts of each way before these, from which the split learns"),
        "samples": option(8, "prompts of which losses are measured"),
        "model": option(None, "a model on the hub, or a folder; by default SmolLM2-135M-Instruct"),
        "text": option(str(ROOT / "examples" / "frankenstein_letters.txt"), "text of the prompts"),
        "threads": option(2, "threads where losses are measured"),
    },
)

if __name__ == "__main__":
    STUDY.main()
