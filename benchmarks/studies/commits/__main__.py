"""Is a commit slower than one before it? TTFT and time per token of both, in turn, on two cores.

    python -m benchmarks.studies.commits --before 7e828c9
    python -m benchmarks.studies.commits --before 7e828c9 --after 03ac95c --lengths 1024 --decoded-lengths 512
    python -m benchmarks.studies.commits --before 7e828c9 --most-mean 1.02 --most-cell 1.05

Each commit has a job of two ranks of one thread, in a checkout of its own, for the whole run; without --after the
second is this checkout. TTFTs are those of SmolLM2 over both ranks (`single` computes on one of them). Tokens are
decoded by one rank, over keys and values that are drawn (benchmarks/studies/retrieved_prompt.py), from the full cache
and from what policies keep. The commits measure in turn (A B, B A, A B, ...), each alone.

A ratio is the time after over the time before: the median over rounds, and its 95% interval by the percentile
bootstrap; the mean is the geometric one over all cells. It needs two cores that are otherwise idle. Appends a JSON line
per cell to benchmarks/results/commits.jsonl. With --most-mean and --most-cell it fails if the last run is above them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, errors_in_one_line, last_run, option
from benchmarks.harness.text_table import Rows
from benchmarks.studies.commits.job import NUM_RANKS, Job, job_of
from launch.program.text_table import text_table

PREFILLS = ["single", "kv_runahead", "zigzag"]
DECODED = ["full", "snapkv", "adakv", "4 bits", "infinigen"]
RESAMPLES = 10_000


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per cell."""
    options = run.options
    if options.before is None:
        raise SystemExit("--before is missing; name the commit that this one is compared with, such as --before HEAD~3")
    names = {"before": options.before, "after": options.after}
    with errors_in_one_line(), job_of(options.before) as before, job_of(options.after) as after:
        jobs = {"before": before, "after": after}
        for name, length in product(options.prefills, options.lengths):
            request = {"prefill": name, "tokens": length}
            times = _in_turn(run, jobs, request, f"TTFT, {name}, {length:,} tokens", NUM_RANKS)
            yield names | {"cell": name, "what": "TTFT", "length": length, "seconds": times}
        room = options.tokens * (options.rounds + 1)
        for name, length in product(options.decoded, options.decoded_lengths):
            for job in jobs.values():
                job.ask({"open": name, "tokens": length, "room": room}, ranks=1)
            request = {"decode": options.tokens}
            times = _in_turn(run, jobs, request, f"decoding, {name}, {length:,} tokens", 1)
            yield names | {"cell": name, "what": "a token", "length": length, "seconds": times}


def _in_turn(run: Run, jobs: dict[str, Job], request: dict[str, Any], label: str, ranks: int) -> dict[str, list[float]]:
    """Seconds of each round, after one that is not counted. The order turns round with every round."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in run.bar(range(run.options.rounds + 1), label):
        for name in list(jobs)[:: -1 if number % 2 else 1]:
            seconds = jobs[name].ask(request, ranks=ranks)
            assert seconds is not None
            if number > 0:
                times[name].append(seconds)
    return times


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


def table(found: list[Line]) -> str:
    """The last run's cells, and the geometric mean of their ratios."""
    latest = last_run(found)
    rows: Rows = [("cell", "of", "tokens", "before", "after", "ratio", "95% interval")]
    for line in latest:
        ratio, low, high = mean([ratios(line)])
        times = [f"{1e3 * median(line['seconds'][name]):,.1f} ms" for name in ("before", "after")]
        about = line["cell"], line["what"], f"{line['length']:,}"
        rows.append((*about, *times, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"))
    after = latest[0]["after"] or latest[0]["commit"]
    compared = f"{after} over {latest[0]['before']}, {len(latest[0]['seconds']['after'])} rounds"
    ratio, low, high = mean(list(map(ratios, latest)))
    largest = max(median(ratios(line)) for line in latest)
    said = f"geometric mean of the ratios {ratio:.3f} ({low:.3f} to {high:.3f}), largest {largest:.3f}"
    return f"{text_table(rows, left=(0, 1))}\n{compared}: {said}\n"


def verdict(found: list[Line], options: Namespace) -> str | None:
    """What of the last run is slower than the options allow; None if nothing is."""
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
