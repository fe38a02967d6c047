"""How many requests per second do the servers of two commits answer when some always wait? In five minutes.

    python -m benchmarks.studies.capacity --before 7e828c9
    python -m benchmarks.studies.capacity --before 7e828c9 --after 03ac95c --most-loss 0.03

This is the short form of the study of the server under load (benchmarks/studies/serving.py). Each commit serves for the
whole run, from two ranks of one thread, with launch/serve.py of a checkout of its own and, but for a fixed split, its
own defaults; without --after the second is this checkout. In a round each gets the same requests, all at once, while
the other one idles (A B, B A, ...). Rounds have texts of their own, so no prefix is found again. The first round is not
counted.

A capacity is the requests of a round over the seconds to the end of the last answer. The ratio is the capacity after
over that before: the median over rounds, and its 95% interval by the percentile bootstrap. It needs two cores that are
otherwise idle. Appends a JSON line to benchmarks/results/capacity.jsonl. With --most-loss it fails if the last run's
ratio is further below 1.
"""

from __future__ import annotations

import asyncio
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from tempfile import TemporaryFile

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, errors_in_one_line, in_turn, option
from benchmarks.studies.commits.__main__ import mean
from benchmarks.studies.commits.job import built_kernels, checkout_of, require_like_kernels
from benchmarks.studies.commits.rank import SHARES
from benchmarks.studies.endurance import Server
from benchmarks.studies.serving import Reply, ask, load, spread

NUM_RANKS = 2
SPLIT = ["partition=ratios", f"partition.ratios={SHARES}".replace(" ", "")]
"""A split that nothing was learned for: partition=auto begins with what earlier runs of some commit have kept."""
OPTIONS = ["ranks.threads=1", *SPLIT, "serve.log=false", "serve.max_waiting=1000", "serve.max_per_client=1000"]
"""Options of both servers, which take requests of one client that come all at once."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of both commits.

    Attributes:
        urls: their addresses.
        kernels: whether their kernels of attention are built, as of `built_kernels`.
    """

    urls: Mapping[str, str]
    kernels: Mapping[str, bool | None]


@contextmanager
def servers_of(options: Namespace) -> Iterator[Servers]:
    """Raises: ValueError: there is no such commit, or kernels are built for one alone."""
    if options.before is None:
        raise ValueError("--before is missing; name the commit that this one is compared with, such as --before HEAD~3")
    with ExitStack() as undo:
        found, kernels = dict[str, str](), dict[str, bool | None]()
        for which, commit in (("before", options.before), ("after", options.after)):
            checkout, log = undo.enter_context(checkout_of(commit)), undo.enter_context(TemporaryFile())
            kernels[which] = built_kernels(checkout)
            require_like_kernels(kernels)
            server = Server([*OPTIONS, *options.server], NUM_RANKS, log, checkout=checkout)
            found[which] = undo.enter_context(server).url
        yield Servers(urls=found, kernels=kernels)


def measure(options: Namespace, servers: Servers, _: Variant) -> Iterator[Line]:
    """Capacity of both commits in each round, in requests per second."""
    turns = {which: partial(_capacity, options, which, url) for which, url in servers.urls.items()}
    with errors_in_one_line():
        capacity = in_turn(turns, options.rounds, warmup=1, label=f"{options.requests} requests")
    about: Line = {"length": options.length, "new_tokens": options.new_tokens, "requests": options.requests}
    about["kernels"] = dict(servers.kernels)
    yield {"before": options.before, "after": options.after} | about | {"capacity": capacity}


def _capacity(options: Namespace, which: str, url: str, number: int) -> float:
    draw = random.Random(f"{options.seed} {number}")
    sessions = [spread(draw, options.length, options.vocabulary, draw) for _ in range(options.requests)]
    asking = partial(ask, url, new_tokens=options.new_tokens, key=None)
    began_s = time.perf_counter()
    outcomes = asyncio.run(load(sessions, [0.0] * len(sessions), asking))
    seconds = time.perf_counter() - began_s
    _check(outcomes, which)
    return len(outcomes) / seconds


def _check(outcomes: list[Reply], which: str) -> None:
    """Check that all requests were answered. Raises: ValueError: how many were not, and why the first was not."""
    failed = [each for each in outcomes if not each.is_answered]
    if failed:
        reason = failed[0].reason or f"status {failed[0].status}"
        raise ValueError(f"the server {which} did not answer {len(failed)} of {len(outcomes)} requests: {reason}")


def ratio(line: Line) -> tuple[float, float, float]:
    """Median over rounds of the capacity after over that of the same round before, and its 95% interval."""
    pairs = zip(line["capacity"]["before"], line["capacity"]["after"], strict=True)
    return mean([[after / before for before, after in pairs]])


def interval(line: Line) -> str:
    """The 95% interval in words."""
    return "{1:.3f} to {2:.3f}".format(*ratio(line))


TABLE = Table(
    columns={
        "before": lambda line: line["before"],
        "after": lambda line: line["after"] or line["commit"],
        "rounds": lambda line: str(len(line["capacity"]["after"])),
        "requests": lambda line: str(line["requests"]),
        "capacity before": lambda line: f"{median(line['capacity']['before']):.3f} per s",
        "capacity after": lambda line: f"{median(line['capacity']['after']):.3f} per s",
        "ratio": lambda line: f"{ratio(line)[0]:.3f}",
        "95% interval": interval,
    },
    left=(0, 1),
)


def verdict(found: list[Line], options: Namespace) -> str | None:
    """Words on a loss of the last run that is larger than the options allow; None if it is not."""
    last = found[-1]
    if options.most_loss is None or ratio(last)[0] >= 1 - options.most_loss:
        return None
    return f"the ratio {ratio(last)[0]:.3f} ({interval(last)}) is below 1 - {options.most_loss:g} of --most-loss"


STUDY = Study(
    name="capacity",
    text=__doc__,
    has="capacity",
    prepare=servers_of,
    measure=measure,
    table=TABLE,
    verdict=verdict,
    options={
        "before": option(None, "the commit that the other is compared with"),
        "after": option(None, "by default this checkout"),
        "server": option(["model=smollm2"], "options of both servers", metavar="NAME=VALUE"),
        "rounds": option(6),
        "requests": option(12, "of a round, all at once"),
        "length": option(2000, "longest prompt in tokens; the shortest is a sixteenth of it"),
        "vocabulary": option(10_000, "prompts are drawn from the token ids below it"),
        "new_tokens": option(32, "tokens of an answer"),
        "seed": option(0, "of the prompts"),
        "most-loss": option(None, "most by which the ratio may be below 1; by default any", type=float),
    },
)

if __name__ == "__main__":
    STUDY.main()
