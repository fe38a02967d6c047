"""How much sooner is the first token with sparse attention in the prefill, and what does it lose?

    python -m benchmarks.studies.sparse_prefill
    python -m benchmarks.studies.sparse_prefill --threshold 0.95 --exact-layers 5 6 7 8 9
    python -m benchmarks.studies.sparse_prefill --tokens 16384 --density 0.15 --config FOLDER --samples 0

Two ranks of one thread have SmolLM2, or with --config a model of random weights. Each way (the exact prefill, and
xattention with its default threshold or with --threshold, --density, --stride and --exact-layers) first computes
prompts from which its partition=auto learns, then both take turns. Copy-NLL is the loss, in nats per token, of a
prompt's first --passage tokens where they come again after it, by a prefill of the same attention and exact attention
after it; the difference is that to the exact prefill, mean over --samples. The prompts are the example text and this
documentation.

The bound is the time of the exact prefill less the part of its operations that attention to the other blocks takes. It
needs two cores that are otherwise idle. Appends a JSON line per length and way to
benchmarks/results/sparse_prefill.jsonl.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.lines import Line, measured
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, newest, option
from benchmarks.harness.text_table import markdown
from benchmarks.studies.commits.job import RankPair
from benchmarks.studies.sparse_prefill.pictures import by_density, by_length, density, gain, loss
from launch.exact.search import ranges

RANK = Path("benchmarks/studies/sparse_prefill/rank.py")
LEARNED = 2
"""Prompts from which a split learns before those that count."""
SMOLLM2_SHARE = {4096: 0.40, 8000: 0.57}
"""Share of attention in the operations of SmolLM2's prefill, by the length of the prompt."""


def ways_of(options: Namespace) -> dict[str, dict[str, Any]]:
    """Options of the prefill of each way."""
    exact, given = options.exact_layers, {"attention": "xattention", "stride": options.stride}
    given |= {"exact_layers": exact} if exact else {}
    but = f", {ranges(sorted(exact))} exact" if exact else ""
    each = [{"density": density} for density in options.density] or [{"threshold": at} for at in options.threshold]
    sparse = {f"xattention {name} {value:g}{but}": given | {name: value} for one in each for name, value in one.items()}
    return {"exact": {}} | sparse


def variants(options: Namespace) -> Iterator[Variant]:
    """Prompts, by length. Raises: ValueError: an option is out of range."""
    if min(options.rounds, *options.tokens) < 1 or min(options.tokens) <= 2 * options.passage:
        raise ValueError("--rounds must be above 0, and --tokens more than twice --passage")
    yield from ({"tokens": tokens} for tokens in options.tokens)


@contextmanager
def ranks_of(options: Namespace) -> Iterator[RankPair]:
    """Two ranks with the model."""
    job = RankPair(ROOT, program=RANK)
    try:
        named = {"name": "smollm2"} if options.config is None else {"name": "random", "config": options.config}
        job.ask({"open": named})
        yield job
        job.close()
    finally:
        job.kill()


def measure(options: Namespace, job: RankPair, variant: Variant) -> Iterator[Line]:
    """Both ways at one length: a line each."""
    tokens, ways = variant["tokens"], ways_of(options)

    def prefilled(way: str, number: int) -> Any:
        return job.ask({"way": way, "tokens": tokens, "sample": number, "options": ways[way]})

    with errors_in_one_line():
        for _, way in ((number, way) for number in range(LEARNED) for way in ways):
            prefilled(way, 0)
        found = in_turn({way: partial(prefilled, way) for way in ways}, options.rounds, label=f"{tokens:,} tokens")
        copies: dict[str, list[Any]] = {way: [] for way in ways}
        for sample in range(options.samples):
            for way in ways:
                asked = {"copy": options.passage, "tokens": tokens, "sample": sample, "options": ways[way]}
                copies[way].append(job.ask(asked, ranks=1))
    for way, runs in found.items():
        yield (
            {"way": way, "model": options.config or "smollm2"}
            | variant
            | {
                "options": ways[way],
                "ttft_s": [each["ttft_s"] for each in runs],
                "exact_s": [each["ttft_s"] for each in found["exact"]],
                "boundaries": [each["boundaries"] for each in runs],
                "wait_s": [each["wait_s"] for each in runs],
                "density": [each["density"] for each in runs],
                "nll": [each["nll"] for each in copies[way]],
                "exact_nll": [each["nll"] for each in copies["exact"]],
                "covered": [each["covered"] for each in copies[way]],
            }
        )


def bound(line: Line) -> str:
    """The most that the density allows by operations, where the share of attention is known."""
    share, kept = SMOLLM2_SHARE.get(line["tokens"]), density(line)
    return "" if share is None or kept is None else f"{1 / (1 - share * (1 - kept)):.2f}"


COLUMNS: dict[str, Callable[[Line], str]] = {
    "prefill": lambda line: line["way"],
    "model": lambda line: Path(line["model"]).name,
    "tokens": lambda line: f"{line['tokens']:,}",
    "TTFT": lambda line: f"{median(line['ttft_s']):.2f} s",
    "times as fast": lambda line: f"{gain(line):.2f}",
    "at most, by FLOPs": bound,
    "density": lambda line: "" if density(line) is None else f"{density(line):.0%}",
    "expected coverage": lambda line: f"{mean(line['covered']):.0%}" if line["covered"] else "",
    "copy-NLL, nats more": lambda line: "" if loss(line) is None else f"{loss(line):+.3f}",
    "rounds": lambda line: str(len(line["ttft_s"])),
}


def table(found: list[Line]) -> str:
    """A row for the newest line of each model, length and way."""
    shown = newest("model", "tokens", "way")(found)
    rows = [tuple(cell(line) for cell in COLUMNS.values()) for line in shown]
    return f"{markdown([tuple(COLUMNS), *rows])}\n{measured(shown)}"


STUDY = Study(
    name="sparse_prefill",
    text=__doc__,
    has="exact_s",
    variants=variants,
    prepare=ranks_of,
    measure=measure,
    table=table,
    pictures={"sparse_ttft.png": by_length, "sparse_loss.png": by_density},
    page="sparse_prefill.md",
    options={
        "tokens": option([4096, 8000], "lengths of the prompts"),
        "threshold": option([0.99], "shares of the expected attention"),
        "density": {"type": float, "nargs": "*", "default": [], "help": "shares of the blocks, in place of thresholds"},
        "stride": option(16, "tokens of a cell"),
        "exact-layers": {"type": int, "nargs": "*", "default": [], "help": "layers that attend to all keys"},
        "config": option(None, "folder of a config, for random weights"),
        "rounds": option(4, "of all ways in turns"),
        "samples": option(4, "of copies"),
        "passage": option(512, "tokens that come again"),
    },
)

if __name__ == "__main__":
    STUDY.main()
