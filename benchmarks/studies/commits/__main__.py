"""Is a commit slower than one before it? TTFT and time per token of both, in turn, on two cores.

    python -m benchmarks.studies.commits --before 7e828c9
    python -m benchmarks.studies.commits --before 7e828c9 --after 03ac95c --lengths 1024 --decoded-lengths 512

Each commit has a job of two ranks of one thread, in a checkout of its own, for the whole run; without --after the
second is this checkout. TTFTs are those of SmolLM2 over both ranks (`single` computes on one of them). Tokens are
decoded by one rank, over keys and values that are drawn (benchmarks/studies/retrieved_prompt.py), from the full cache
and from what policies keep. The commits measure in turn (A B, B A, A B, ...), each alone.

A ratio is the time after over the time before: the median over rounds, and its 95% interval by the percentile
bootstrap. It needs two cores that are otherwise idle. Appends a JSON line per cell to benchmarks/results/commits.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from statistics import geometric_mean, median
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


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the median."""
    drawn_Rn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(np.asarray(values)[drawn_Rn], axis=1), [0.025, 0.975])
    return float(low), float(high)


def table(found: list[Line]) -> str:
    """The last run's cells, and the geometric mean of their ratios."""
    latest = last_run(found)
    rows: Rows = [("cell", "of", "tokens", "before", "after", "ratio", "95% interval")]
    for line in latest:
        low, high = interval(ratios(line))
        times = [f"{1e3 * median(line['seconds'][name]):,.1f} ms" for name in ("before", "after")]
        about = line["cell"], line["what"], f"{line['length']:,}"
        rows.append((*about, *times, f"{median(ratios(line)):.3f}", f"{low:.3f} to {high:.3f}"))
    medians = [median(ratios(line)) for line in latest]
    after = latest[0]["after"] or latest[0]["commit"]
    compared = f"{after} over {latest[0]['before']}, {len(latest[0]['seconds']['after'])} rounds"
    mean = f"geometric mean of the ratios {geometric_mean(medians):.3f}, largest {max(medians):.3f}"
    return f"{text_table(rows, left=(0, 1))}\n{compared}: {mean}\n"


STUDY = Study(
    name="commits",
    text=__doc__,
    has="cell",
    measure=measure,
    table=table,
    options={
        "before": option(None, "the commit that the other is compared with"),
        "after": option(None, "by default this checkout"),
        "prefills": option(PREFILLS, nargs="*"),
        "lengths": option([1024, 4096], "prompts whose TTFT is measured"),
        "decoded": option(DECODED, "what is decoded from", nargs="*"),
        "decoded-lengths": option([512, 4096, 8000], "tokens in the cache"),
        "tokens": option(8, "that are decoded in a round"),
        "rounds": option(7),
    },
)

if __name__ == "__main__":
    STUDY.main()
