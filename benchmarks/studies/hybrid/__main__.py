"""Does a chain gain as much with a hybrid model as with attention alone? TTFT of both, in turn, on two cores.

    python -m benchmarks.studies.hybrid
    python -m benchmarks.studies.hybrid --lengths 4096 --least-gain 0.95 --most-error 0.15

Two ranks of one thread have two models of Qwen3-Next's shape, scaled down, with random weights in float32: `hybrid`, of
whose layers three hold a state and the fourth attends, and `attention`, of the same widths, whose layers all attend. At
each length both prefill prompts from which partition=auto learns, then both measure in turn, with one rank (the other
stands still) and with two. One more prompt records the timeline, of which the picture of the longest prompt is drawn.

`simulated` is the chain simulated with that split, from the compute that both ranks measured at once, over the link
that a ping found; 4 and 8 ranks are simulated over --gbps with the splits that a search finds. `gain` is the speed-up
of the hybrid over that of attention alone. It needs two cores that are otherwise idle. Appends a JSON line per model
and length to benchmarks/results/hybrid.jsonl; with --least-gain and --most-error it fails if the last run is beyond
them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.declared import Curves, Panel, Table, from_zero
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, last_run, newest, option
from benchmarks.studies.commits.job import RankPair
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.searches.best_split import best_split
from partitioner.simulation.chain import Simulated, simulate
from partitioner.simulation.cluster import Cluster
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, even
from runahead.timeline.picture import timeline_png
from runahead.timeline.trace import TraceSpan

RANK = Path("benchmarks/studies/hybrid/rank.py")
MODELS, WAYS = ("hybrid", "attention"), ("single", "kv_runahead")
LEARNED = 3
"""Prompts from which the split learns before those that count."""
SIZES = ("layers", "hidden", "mlp", "period")
STRIDES = 64
"""A boundary is searched in steps of an even chunk's length divided by this."""


def lengths(options: Namespace) -> Iterator[Variant]:
    """Prompts, by length. Raises: ValueError: an option is out of range."""
    if options.hidden % 64 or not 1 <= options.period <= options.layers or min(options.rounds, *options.lengths) < 1:
        raise ValueError("--hidden must be a multiple of 64, --period at most --layers, --rounds and --lengths above 0")
    for length in options.lengths:
        yield {"length": length}


@contextmanager
def ranks_of(options: Namespace) -> Iterator[RankPair]:
    """Two ranks with both models."""
    job = RankPair(ROOT, program=RANK)
    try:
        for model in MODELS:
            job.ask({"open": model} | {name: getattr(options, name) for name in SIZES})
        yield job
        job.close()
    finally:
        job.kill()


def measure(options: Namespace, job: RankPair, variant: Variant) -> Iterator[Line]:
    """Both models at one length: a line each."""
    length = variant["length"]
    with errors_in_one_line():
        for _, model in product(range(LEARNED), MODELS):
            _prefill(job, "kv_runahead", model, length, 0)
        turns = {f"{model} {way}": partial(_prefill, job, way, model, length) for model, way in product(MODELS, WAYS)}
        found = in_turn(turns, options.rounds, label=f"{length:,} tokens")
        recorded = {model: _prefill(job, "kv_runahead", model, length, 0, record=True) for model in MODELS}
        probes = {model: job.ask({"probe": model, "tokens": length}) for model in MODELS}
    for model in MODELS:
        runs, last = found[f"{model} kv_runahead"], recorded[model]
        about = {"model": model} | variant | {name: getattr(options, name) for name in SIZES}
        yield about | {
            "single_s": [each["ttft_s"] for each in found[f"{model} single"]],
            "chain_s": [each["ttft_s"] for each in runs],
            "boundaries": [each["boundaries"] for each in runs],
            "wait_s": [each["wait_s"] for each in runs],
            "sent_bytes": sum(runs[-1]["sent_bytes"]),
            **simulations(probes[model], runs[-1]["boundaries"], options),
            "spans": last["spans"] if length == max(options.lengths) else [],
        }


def _prefill(job: RankPair, way: str, model: str, length: int, number: int, *, record: bool = False) -> Any:
    return job.ask({"prefill": way, "model": model, "tokens": length, "record": record})


def simulations(probe: dict[str, Any], boundaries: list[int], options: Namespace) -> Line:
    """Simulated times of the measured split, and of more ranks.

    Args:
        probe: compute, link and bytes, as the ranks measured them.
    """
    cost, states = MeasuredCost.from_json(probe["cost"]), probe["state_bytes"]

    def cluster(num_ranks: int, link: Link | None) -> Cluster:
        return Cluster.chain(
            cost,
            num_ranks,
            link,
            kv_bytes_per_token=probe["kv_bytes_per_token"],
            state_bytes=states,
            prefill=PrefillOptions(),
            backend="gloo",
        )

    length, ranks = boundaries[-1], len(boundaries) - 1
    as_run = simulate(ContextPartition(boundaries=tuple(boundaries)), cluster(ranks, Link.from_json(probe["link"])))
    single_s, more = simulate(even(length, 1), cluster(1, None)).ttft_s, []
    for number in options.ranks:
        wide = cluster(number, Link.from_gbps(options.gbps, latency_s=10e-6))
        found = best_split(length, number, wide, min_stride=max(1, length // (STRIDES * number)), leave_out=False)
        result = simulate(found.partition, wide, record=True)
        more.append(
            {
                "ranks": number,
                "boundaries": list(found.partition.boundaries),
                "ttft_s": result.ttft_s,
                "state_wait_s": waits_for_states(result),
            }
        )
    return {
        "states": len(cost.states),
        "state_bytes": (ranks - 1) * len(cost.states) * states,
        "simulated_single_s": single_s,
        "simulated_s": as_run.ttft_s,
        "simulated": more,
        "compute": probe["cost"],
        "link": probe["link"],
    }


def waits_for_states(result: Simulated) -> float:
    """Seconds that the last rank waits for states."""
    spans = result.spans[-1]
    return sum(span.end_s - span.start_s for span in spans if span.kind == "wait" and span.detail == "state")


def speed_up(line: Line) -> float:
    """TTFT of one rank over that of two, the median of rounds."""
    return median(one / two for one, two in zip(line["single_s"], line["chain_s"], strict=True))


def error(line: Line) -> float:
    """The simulated TTFT of two ranks beside the measured one, as a ratio less 1."""
    return float(line["simulated_s"]) / median(line["chain_s"]) - 1


def gain(line: Line, found: list[Line]) -> float | None:
    """Speed-up of a hybrid over that of attention alone, in the same rounds; None of a line without the other."""
    of_round = [each for each in found if all(each.get(name) == line.get(name) for name in ("date", "length", *SIZES))]
    other = next((each for each in of_round if each["model"] == "attention"), None)
    return None if other is None or line["model"] == "attention" else speed_up(line) / speed_up(other)


def with_gains(found: list[Line]) -> list[Line]:
    """The newest line of each model and length, with its gain."""
    return [line | {"gain": gain(line, found)} for line in newest("model", "length", *SIZES)(found)]


def simulated_speed_up(num_ranks: int) -> Callable[[Line], float | None]:
    """Simulated TTFT of one rank over that of several; None of lines without that number."""

    def value(line: Line) -> float | None:
        found = next((each for each in line["simulated"] if each["ranks"] == num_ranks), None)
        return None if found is None else float(line["simulated_single_s"] / found["ttft_s"])

    return value


def of_ranks(num_ranks: int) -> Callable[[Line], str]:
    """A column: the simulated speed-up of so many ranks, and the last one's wait for states."""

    def cell(line: Line) -> str:
        found = next((each for each in line["simulated"] if each["ranks"] == num_ranks), None)
        speed = simulated_speed_up(num_ranks)(line)
        return "-" if found is None or speed is None else f"{speed:.2f}, {found['state_wait_s'] / found['ttft_s']:.1%}"

    return cell


def mebibytes(name: str) -> Callable[[Line], str]:
    """A column of bytes."""
    return lambda line: f"{line[name] / 2**20:,.2f} MiB"


TABLE = Table(
    lines=lambda found: with_gains(list(found)),
    columns={
        "model": lambda line: line["model"],
        "tokens": lambda line: f"{line['length']:,}",
        "one rank": lambda line: f"{median(line['single_s']):.2f} s",
        "two ranks": lambda line: f"{median(line['chain_s']):.2f} s",
        "over one": lambda line: f"{speed_up(line):.3f}",
        "gain": lambda line: "-" if line["gain"] is None else f"{line['gain']:.3f}",
        "share of the first": lambda line: f"{line['boundaries'][-1][1] / line['length']:.3f}",
        "sent": mebibytes("sent_bytes"),
        "states": mebibytes("state_bytes"),
        "wait of the last": lambda line: f"{median(each[-1] for each in line['wait_s']):.2f} s",
        "simulated": lambda line: f"{line['simulated_s']:.2f} s ({error(line):+.1%})",
        "4 ranks, wait for states": of_ranks(4),
        "8 ranks, wait for states": of_ranks(8),
    },
)

SPEED_UPS = Curves(
    title="Speed-up of a chain with a hybrid model and with attention alone",
    subject=lambda found: "{layers} layers, {hidden} wide, random weights".format(**found[-1]),
    lines=lambda found: with_gains(list(found)),
    curve=lambda line: line["model"],
    x_label="tokens",
    x=lambda line: float(line["length"]),
    panels=lambda found: [
        Panel("2 ranks, measured", "TTFT of one rank over that of the chain", speed_up),
        *(
            Panel(f"{n} ranks, simulated", "TTFT of one rank over that of the chain", simulated_speed_up(n))
            for n in (4, 8)
        ),
    ],
    finish=from_zero,
)


def skew(model: str) -> Callable[[list[Line]], bytes | None]:
    """The timeline of a model's longest prompt in the last run that has one."""

    def picture(found: list[Line]) -> bytes | None:
        line = next((each for each in reversed(found) if each["model"] == model and each["spans"]), None)
        if line is None:
            return None
        spans = [[TraceSpan(**dict(zip(FIELDS, each, strict=True))) for each in rank] for rank in line["spans"]]
        what = f"{line['states']} of {line['layers']} layers hold a state" if line["states"] else "all layers attend"
        return timeline_png(spans, subject=f"{model}, {line['length']:,} tokens on two ranks: {what}")

    return picture


FIELDS = ("kind", "layer", "start_s", "end_s", "detail")


def verdict(found: list[Line], options: Namespace) -> str | None:
    """Words on what in the last run is beyond the options; None if nothing is."""
    latest, wrong = last_run(found), list[str]()
    for line in latest:
        ratio, off = gain(line, latest), error(line)
        if options.least_gain is not None and ratio is not None and ratio < options.least_gain:
            wrong.append(
                f"the gain {ratio:.3f} at {line['length']:,} tokens is below --least-gain {options.least_gain:g}"
            )
        if options.most_error is not None and abs(off) > options.most_error:
            wrong.append(
                f"{line['model']} at {line['length']:,} tokens: the simulated TTFT is {off:+.1%} off, more than "
                f"--most-error {options.most_error:g}"
            )
    return "; ".join(wrong) or None


STUDY = Study(
    name="hybrid",
    text=__doc__,
    has="simulated_s",
    variants=lengths,
    prepare=ranks_of,
    measure=measure,
    table=TABLE,
    pictures={
        "hybrid.png": SPEED_UPS,
        "hybrid_skew.png": skew("hybrid"),
        "hybrid_skew_attention.png": skew("attention"),
    },
    verdict=verdict,
    options={
        "lengths": option([2048, 4096, 8192], "tokens of the prompts"),
        "rounds": option(4, "prompts of each model that count, with one rank and with two"),
        "layers": option(48),
        "hidden": option(576, "width of the models, a multiple of 64"),
        "mlp": option(1536, "width of their MLPs"),
        "period": option(4, "the last of so many layers of the hybrid attends"),
        "ranks": option([4, 8], "numbers of ranks that are simulated"),
        "gbps": option(25.0, "of the links between those, in 1e9 bits per second"),
        "least-gain": option(None, "least gain with which it succeeds; by default any", type=float),
        "most-error": option(None, "largest error of a simulated TTFT, likewise", type=float),
    },
)

if __name__ == "__main__":
    STUDY.main()
