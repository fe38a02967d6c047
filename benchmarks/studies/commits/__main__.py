"""Is a commit slower than one before it? TTFT and time per token of both, in turn, on two cores.

    python -m benchmarks.studies.commits --before 7e828c9
    python -m benchmarks.studies.commits --before 7e828c9 --after 03ac95c --lengths 1024 --decoded-lengths 512
    python -m benchmarks.studies.commits --before 7e828c9 --most-mean 1.02 --most-cell 1.05

Each commit has a job of two ranks of one thread, in a checkout of its own, for the whole run; without --after the
second is this checkout. Kernels of attention are built first; a line says which commit has some. TTFTs are those of
SmolLM2 over both ranks (`single` computes on one of them). Tokens are decoded by one rank, over keys and values that
are drawn (benchmarks/studies/retrieved_prompt.py), from the full cache and from what policies keep. The commits measure
in turn (A B, B A, A B, ...), each alone.

A ratio is the time after over the time before: the median over rounds, and its 95% interval by the percentile
bootstrap; the mean is the geometric one over all cells. It needs two cores that are otherwise idle. Appends a JSON line
per cell to benchmarks/results/commits.jsonl. With --most-mean and --most-cell it fails if the last run is above them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, last_run, option
from benchmarks.studies.commits.job import NUM_RANKS, RankPair, job_of, require_like_kernels

PREFILLS = ["single", "kv_runahead", "zigzag"]
DECODED = ["full", "snapkv", "adakv", "4 bits", "infinigen"]
RESAMPLES = 10_000


def cells(options: Namespace) -> Iterator[Variant]:
    """Prefills by length, then tokens by what is decoded from and how many are in the cache."""
    for name, length in product(options.prefills, options.lengths):
        yield {"cell": name, "what": "TTFT", "length": length}
    for name, length in product(options.decoded, options.decoded_lengths):
        yield {"cell": name, "what": "a token", "length": length}


@contextmanager
def jobs_of(options: Namespace) -> Iterator[dict[str, RankPair]]:
    """The ranks of both commits. Raises: ValueError: there is no such commit."""
    if options.before is None:
        raise ValueError("--before is missing; name the commit that this one is compared with, such as --before HEAD~3")
    with job_of(options.before) as before, job_of(options.after) as after:
        jobs = {"before": before, "after": after}
        require_like_kernels({which: job.kernels for which, job in jobs.items()})
        yield jobs


def measure(options: Namespace, jobs: dict[str, RankPair], cell: Variant) -> Iterator[Line]:
    """Seconds of both commits in each round, after one round that is not counted."""
    name, length, ranks = cell["cell"], cell["length"], NUM_RANKS
    request: dict[str, Any] = {"prefill": name, "tokens": length}
    with errors_in_one_line():
        if cell["what"] == "a token":
            ranks, request = 1, {"decode": options.tokens}
            room = options.tokens * (options.rounds + 1)
            for job in jobs.values():
                job.ask({"open": name, "tokens": length, "room": room}, ranks=1)
        turns = {which: partial(_seconds, job, request, ranks) for which, job in jobs.items()}
        seconds = in_turn(turns, options.rounds, warmup=1, label=f"{cell['what']}, {name}, {length:,} tokens")
    kernels = {which: job.kernels for which, job in jobs.items()}
    yield {"before": options.before, "after": options.after} | cell | {"seconds": seconds, "kernels": kernels}


def _seconds(job: RankPair, request: dict[str, Any], ranks: int, number: int) -> float:
    seconds = job.ask(request, ranks=ranks)
    assert seconds is not None
    return seconds


def ratios(line: Line) -> list[float]:
    """Time after over time before, of each round."""
    return [after / before for before, after in zip(line["seconds"]["before"], line["seconds"]["after"], strict=True)]


def mean(cells: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Geometric mean of the cells' median ratios, and its 95% interval; of one cell these are the median's own."""
    generator, logs_R = np.random.default_rng(0), np.zeros(RESAMPLES)
    for ratios_n in map(np.asarray, cells):
        drawn_Rn = generator.integers(len(ratios_n), size=(RESAMPLES, len(ratios_n)))
        logs_R += np.log(np.median(ratios_n[drawn_Rn], axis=1)) / len(cells)
    low, high = np.exp(np.quantile(logs_R, [0.025, 0.975]))
    return float(np.exp(np.mean([np.log(median(each)) for each in cells]))), float(low), float(high)


def milliseconds(which: str) -> Callable[[Line], str]:
    """A column: the median over rounds."""
    return lambda line: f"{1e3 * median(line['seconds'][which]):,.1f} ms"


CELLS = Table(
    lines=last_run,
    columns={
        "cell": lambda line: line["cell"],
        "of": lambda line: line["what"],
        "tokens": lambda line: f"{line['length']:,}",
        "before": milliseconds("before"),
        "after": milliseconds("after"),
        "ratio": lambda line: f"{mean([ratios(line)])[0]:.3f}",
        "95% interval": lambda line: "{1:.3f} to {2:.3f}".format(*mean([ratios(line)])),
    },
    left=(0, 1),
)


def table(found: list[Line]) -> str:
    """The last run's cells, and the geometric mean of their ratios."""
    latest = last_run(found)
    after = latest[0]["after"] or latest[0]["commit"]
    compared = f"{after} over {latest[0]['before']}, {len(latest[0]['seconds']['after'])} rounds"
    ratio, low, high = mean(list(map(ratios, latest)))
    largest = max(median(ratios(line)) for line in latest)
    said = f"geometric mean of the ratios {ratio:.3f} ({low:.3f} to {high:.3f}), largest {largest:.3f}"
    return f"{CELLS(found)}\n{compared}: {said}\n"


def verdict(found: list[Line], options: Namespace) -> str | None:
    """Words on what is slower in the last run than the options allow; None if nothing is."""
    latest, slower = last_run(found), list[str]()
    ratio, _, _ = mean(list(map(ratios, latest)))
    if options.most_mean is not None and ratio > options.most_mean:
        slower.append(f"the mean ratio {ratio:.3f} is above --most-mean {options.most_mean:g}")
    for line in latest:
        ratio = median(ratios(line))
        if options.most_cell is not None and ratio > options.most_cell:
            cell = f"{line['what']}, {line['cell']}, {line['length']:,} tokens"
            slower.append(f"the ratio {ratio:.3f} of {cell} is above --most-cell {options.most_cell:g}")
    return "; ".join(slower) or None


STUDY = Study(
    name="commits",
    text=__doc__,
    has="cell",
    variants=cells,
    prepare=jobs_of,
    measure=measure,
    table=table,
    verdict=verdict,
    options={
        "before": option(None, "the commit that the other is compared with"),
        "after": option(None, "by default this checkout"),
        "prefills": option(PREFILLS, nargs="*"),
        "lengths": option([1024, 4096], "prompts whose TTFT is measured"),
        "decoded": option(DECODED, "what is decoded from", nargs="*"),
        "decoded-lengths": option([512, 4096, 8000], "tokens in the cache"),
        "tokens": option(8, "that are decoded in a round"),
        "rounds": option(7),
        "most-mean": option(None, "largest mean ratio with which it succeeds; by default any", type=float),
        "most-cell": option(None, "largest ratio of a cell, likewise", type=float),
    },
)

if __name__ == "__main__":
    STUDY.main()
