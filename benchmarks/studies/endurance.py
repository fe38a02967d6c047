"""Does a server under load lose requests, or grow? Random requests, closed connections and stopped ranks, for long.

    python -m benchmarks.studies.endurance --server model=smollm2 --seconds 1800 --rate 1.2

Starts launch/serve.py on several ranks and sends prompts and answers of random lengths at random times (Poisson). A
share of the clients closes its connection: before the server says anything, while the request waits, in its prefill, or
while it is decoded. Now and then a rank, each in turn, is stopped (SIGSTOP) for less than ranks.timeout_s, and goes on.
At the end the server is drained (SIGTERM).

Every request has to be answered with as many tokens as it asked for, or told why not, by a status and a reason; at the
end no request may be running or waiting, and the server has to end with status 0. Else the exit status is 1. Memory,
threads and open files of each rank are sampled all the time; the table has their medians over the second tenth of the
requests and over the last tenth, and the ratio.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol, Self
from urllib.parse import urlsplit

import psutil
from tqdm import tqdm

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.pictures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend
from benchmarks.harness.study import Study, Variant, newest, option
from benchmarks.network.interruptions import signals_raise
from benchmarks.studies.serving import Reply, Session, ask, load, percentiles, uniform
from launch.program.launcher import end_with_parent
from launch.program.text_table import text_table
from launch.serve import SERVE
from runahead.picture_style import new_figure, png, set_title, style_axes

START_S = 600.0
"""Seconds within which a server has loaded its model and is ready."""
END_S = 60.0
"""Seconds beyond serve.drain_s within which a server has ended."""
LATEST_S = 60.0
"""Seconds after the last answer within which the server's counts are zero: cancelled prefills run to their end."""
LAST_S = 5.0
"""Seconds after the server has ended within which its connections end, too."""
POLL_S = 0.02

STATES = ("sent", "waiting", "prefill", "decoding")
"""States of a request, in the order in which it goes through them."""
QUANTITIES = {"rss_mib": "RSS in MiB", "pss_mib": "PSS in MiB", "threads": "threads", "files": "open files"}
"""Quantities that are sampled of each rank."""
WHOLE = ("answered", "closed", "refused", "failed")
"""Ends of requests that are as they should be: answered, closed by the client, or told why not (429, or a failure)."""

Sample = dict[str, float]


class RunningServer(Protocol):
    """A running server as the load sees it.

    Attributes:
        url: its address.
        processes: process id of each rank.
    """

    url: str
    processes: list[int]

    @property
    def is_running(self) -> bool: ...


class Server:
    """launch/serve.py under torchrun, on a free port. Use it in a `with` block.

    Args:
        overrides: options of launch/serve.py.
        log: file for what it says.
        checkout: folder whose code serves.

    Attributes:
        url: its address, once it is ready.
        processes: process id of each rank.
    """

    def __init__(self, overrides: Sequence[str], num_ranks: int, log: IO[bytes], *, checkout: Path = ROOT) -> None:
        self._log = log
        # Comments come often, so that the state of a request is known soon.
        options = ["serve.ping_s=0.2", *overrides, "serve.port=0"]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        self._launcher = subprocess.Popen(
            [sys.executable, *ranks, str(checkout / "launch" / "serve.py"), *options],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
        self.url = ""
        self.processes: list[int] = []

    def __enter__(self) -> Self:
        try:
            deadline = time.monotonic() + START_S
            while (found := re.search(r"^serving .+ on (http://[^\s,]+)", self.said, re.MULTILINE)) is None:
                if not self.is_running or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start: {self.last_words}")
                time.sleep(0.1)
            self.url = found[1]
            ranks = {}
            for process in psutil.Process(self._launcher.pid).children():
                with suppress(psutil.Error, KeyError):
                    ranks[int(process.environ()["RANK"])] = process.pid
            self.processes = [pid for _, pid in sorted(ranks.items())]
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _kill(self) -> None:
        """End what is left: torchrun's ranks end with it, stopped ones too."""
        self._launcher.kill()
        self._launcher.wait()

    @property
    def is_running(self) -> bool:
        return self._launcher.poll() is None

    @property
    def said(self) -> str:
        """Text that the ranks have printed."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    @property
    def last_words(self) -> str:
        """The lines of ranks that say why they end, else the last line."""
        said = [line for line in self.said.splitlines() if line.strip()]
        return " | ".join([line for line in said if line.startswith("[rank ")] or said[-1:])

    def metrics(self) -> dict[str, float]:
        """Values of /metrics, by name. Raises: OSError, http.client.HTTPException: there is no answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        named = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("runahead:"): float(value) for name, value in named}

    def left(self, within_s: float) -> dict[str, float]:
        """Requests that are running or waiting, as soon as there are none, or after so many seconds."""
        deadline = time.monotonic() + within_s
        while True:
            found = self.metrics()
            left = {name: found[f"num_requests_{name}"] for name in ("running", "waiting")}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def drain(self, within_s: float) -> int | None:
        """Ask all ranks to end. Returns the exit status, None if they have not ended after so many seconds."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        try:
            return self._launcher.wait(within_s)
        except subprocess.TimeoutExpired:
            return None


def sample(process: int) -> Sample:
    """`QUANTITIES` of a process. Raises: OSError: it has ended."""
    folder = Path(f"/proc/{process}")
    rows = (line.partition(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    mib = {name: int(value.split()[0]) / 1024 for name, _, value in rows}
    return {
        "rss_mib": round(mib["Rss"], 2),
        "pss_mib": round(mib["Pss"], 2),
        "threads": len(os.listdir(folder / "task")),
        "files": len(os.listdir(folder / "fd")),
    }


@dataclass(kw_only=True)
class Seen:
    """Observations of a run.

    Attributes:
        sent: number of requests that were sent.
        ends: how each request ended: one of `WHOLE`, or what is wrong with it.
        outcomes: of each request that ended.
        samples: seconds since the start, requests that had ended, and a sample per rank.
        stops: how often a rank was stopped.
    """

    sent: int = 0
    ends: list[str] = field(default_factory=list)
    outcomes: list[Reply] = field(default_factory=list)
    samples: list[tuple[float, int, list[Sample]]] = field(default_factory=list)
    stops: int = 0


def arrivals(draw: random.Random, rate: float, seconds: float, least: int) -> list[float]:
    """Seconds at which requests are sent, for so many seconds, and `least` of them at least."""
    starts_s, now_s = list[float](), draw.expovariate(rate)
    while now_s < seconds or len(starts_s) < least:
        starts_s.append(now_s)
        now_s += draw.expovariate(rate)
    return starts_s


async def endure(server: RunningServer, options: Any) -> Seen:
    """Send the load to a server, and stop its ranks in turn. Ends early if the server does."""
    draw, seen = random.Random(options.seed), Seen()
    shortest, longest = (math.log(length) for length in options.lengths)
    starts_s = arrivals(draw, options.rate, options.seconds, options.requests)
    lengths = [round(math.exp(draw.uniform(shortest, longest))) for _ in starts_s]
    sessions: list[Session] = [uniform(draw, length, options.vocabulary) for length in lengths]
    # A line now and then where standard error is a file.
    every_s = 0.5 if sys.stderr.isatty() else 30.0
    with tqdm(total=len(starts_s), unit="request", mininterval=every_s, maxinterval=2 * every_s) as bar:

        async def asking(ids: list[int]) -> Reply:
            seen.sent += 1
            new_tokens, closing = draw.randint(*options.new_tokens), None
            if draw.random() < options.cancelled:
                closing = (draw.choice(STATES), draw.uniform(0.0, options.within_s))
            outcome, end = await send(server.url, ids, new_tokens, closing, options.patience_s)
            seen.outcomes.append(outcome)
            seen.ends.append(end)
            bar.update()
            return outcome

        loading = asyncio.create_task(load(sessions, starts_s, asking))
        watching = asyncio.create_task(_watch(server, seen, options.sample_s, bar))
        stopping = asyncio.create_task(_stop_in_turn(server.processes, seen, options.slow_every, options.slow_s))
        try:
            done, _ = await asyncio.wait({loading, watching}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            if not loading.done():  # the server is gone, and connections with it
                await asyncio.wait({loading}, timeout=LAST_S)
        finally:
            for task in (loading, watching, stopping):
                task.cancel()
            await asyncio.gather(loading, watching, stopping, return_exceptions=True)
    return seen


async def send(
    url: str, ids: list[int], new_tokens: int, closing: tuple[str, float] | None, patience_s: float
) -> tuple[Reply, str]:
    """The outcome of one request, and how it ended.

    Args:
        closing: the client closes its connection so many seconds after the request has come to this state.
        patience_s: seconds after which a request that has not ended counts as hanging.
    """
    outcome = Reply(len(ids))
    answer = asyncio.create_task(ask(url, ids, new_tokens, None, outcome))
    tasks: set[asyncio.Task[Any]] = {answer}
    if closing is not None:
        tasks.add(asyncio.create_task(_moment(outcome, *closing)))
    done, _ = await asyncio.wait(tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if answer in done:
        return outcome, end_of(outcome, new_tokens)
    return outcome, "closed" if done else f"hanging after {patience_s:g} s"


async def _moment(outcome: Reply, state: str, delay_s: float) -> None:
    while STATES.index(outcome.state) < STATES.index(state):
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(delay_s)


def end_of(outcome: Reply, new_tokens: int) -> str:
    """How a request ended that its client did not close: one of `WHOLE`, or what is wrong with it."""
    if outcome.is_answered:
        return "answered" if outcome.new_tokens == new_tokens else "answered with another number of tokens"
    if outcome.reason and outcome.status == 429:
        return "refused"
    if outcome.reason and outcome.status in (0, 503):  # 0: an event of a stream
        return "failed"
    return f"status {outcome.status}: {outcome.reason}" if outcome.reason else "lost, with no word"


async def _watch(server: RunningServer, seen: Seen, every_s: float, bar: Any) -> None:
    """Sample all ranks until the server ends."""
    began_s = time.monotonic()
    while server.is_running:
        with suppress(OSError):  # a rank has just ended
            of_ranks = [sample(process) for process in server.processes]
            seen.samples.append((round(time.monotonic() - began_s, 2), len(seen.ends), of_ranks))
            bar.set_postfix_str("MiB " + ", ".join(f"{each['rss_mib']:.0f}" for each in of_ranks), refresh=False)
        await asyncio.sleep(every_s)


async def _stop_in_turn(processes: Sequence[int], seen: Seen, every_s: float, seconds: float) -> None:
    """Stop a process for so many seconds, every so often, each in turn; never if `every_s` is 0."""
    with suppress(ProcessLookupError):
        for process in itertools.cycle(processes) if every_s else ():
            await asyncio.sleep(every_s)
            os.kill(process, signal.SIGSTOP)
            seen.stops += 1
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(process, signal.SIGCONT)


def measure(options: Namespace, drain_s: float, variant: Variant) -> Iterator[Line]:
    """Measure one line. Raises: SystemExit: the server does not start."""
    with signals_raise(), ExitStack() as undo:
        log = undo.enter_context(open(options.log, "w+b") if options.log else tempfile.TemporaryFile())  # noqa: SIM115
        server = undo.enter_context(Server(options.server, options.ranks, log))
        began_s = time.monotonic()
        seen = asyncio.run(endure(server, options))
        seconds = time.monotonic() - began_s
        left: dict[str, float] = {}
        with suppress(OSError, http.client.HTTPException):
            left = server.left(LATEST_S)
        status = server.drain(drain_s + END_S)
        said = server.last_words if status != 0 else ""
    names = ("lengths", "new_tokens", "rate", "cancelled", "slow_every", "slow_s", "seed")
    about: Line = {"server": " ".join(options.server), "ranks": options.ranks}
    about["options"] = {name: getattr(options, name) for name in names}
    yield about | summary(seen, seconds, left, status, said)


@contextmanager
def drain_s_of(options: Namespace) -> Iterator[float]:
    """The server's serve.drain_s. Raises: ValueError: an option is wrong."""
    try:
        run = SERVE.compose(options.server)
    except ValueError as error:
        raise ValueError(f"--server {' '.join(options.server)}: {error}") from error
    wrong = [
        (options.ranks < 1, f"--ranks {options.ranks} must be at least 1"),
        (options.rate <= 0, f"--rate {options.rate:g} must be above 0"),
        (options.sample_s <= 0, f"--sample_s {options.sample_s:g} must be above 0"),
        (not 0 <= options.cancelled <= 1, f"--cancelled {options.cancelled:g} must be a share from 0 to 1"),
        (
            options.slow_every > 0 and options.slow_s > run.ranks.timeout_s / 2,
            f"--slow_s {options.slow_s:g} must be at most half of ranks.timeout_s={run.ranks.timeout_s:g}",
        ),
    ]
    for name in ("lengths", "new_tokens"):
        least, most = getattr(options, name)
        rule = "must be two numbers from 1 on, the smaller one first"
        wrong.append((not 1 <= least <= most, f"--{name} {least} {most} {rule}"))
    for is_wrong, message in wrong:
        if is_wrong:
            raise ValueError(message)
    yield run.serve.drain_s


def summary(seen: Seen, seconds: float, left: dict[str, float], status: int | None, said: str) -> Line:
    """Figures of a run. Its `problems` are sentences; none if all is as it should be.

    Args:
        left: requests that the server had running and waiting at the end; empty if it did not answer.
        status: its exit status; None if it did not end.
        said: what it said where its status is not 0.
    """
    ends = Counter(seen.ends)
    problems = [f"{count} requests: {end}" for end, count in ends.items() if end not in WHOLE]
    if seen.sent > len(seen.ends):
        problems.append(f"{seen.sent - len(seen.ends)} requests had not ended when the server had")
    if any(left.values()) or not left:
        problems.append(f"left at the end: {left or 'not known, the server did not answer'}")
    if status != 0:
        problems.append(f"exit status {status}: {said}")
    closed = Counter(x.state for x, end in zip(seen.outcomes, seen.ends, strict=True) if end == "closed")
    told = Counter(re.sub(r"\d[\d.,]*", "N", x.reason) for x in seen.outcomes if x.reason)
    answered = [outcome for outcome, end in zip(seen.outcomes, seen.ends, strict=True) if end == "answered"]
    return {
        "outcomes": dict(ends),
        "requests": seen.sent,
        "seconds": seconds,
        "closed": dict(closed),
        "reasons": dict(told.most_common(10)),
        "stops": seen.stops,
        "ttft_s": percentiles([outcome.events_s[0] for outcome in answered if outcome.events_s]),
        "left": left,
        "status": status,
        "growth": [
            {name: growth(seen.samples, len(seen.ends), rank, name) for name in QUANTITIES}
            for rank in range(len(seen.samples[0][2]) if seen.samples else 0)
        ],
        "samples": [[s, ended, [list(each.values()) for each in ranks]] for s, ended, ranks in seen.samples],
        "problems": problems,
    }


def growth(samples: Sequence[tuple[float, int, list[Sample]]], num_ended: int, rank: int, name: str) -> list[float]:
    """Medians of a rank's quantity over the second tenth of the requests and over the last tenth, and their ratio.

    In a run too short for a sample in one of them it is the first sample, or the last one.
    """
    early = [ranks[rank][name] for _, ended, ranks in samples if 0.1 * num_ended <= ended <= 0.2 * num_ended]
    late = [ranks[rank][name] for _, ended, ranks in samples if ended >= 0.9 * num_ended]
    before, after = median(early or [samples[0][2][rank][name]]), median(late or [samples[-1][2][rank][name]])
    return [before, after, after / before]


latest = newest("server", "ranks")


def table(found: list[Line]) -> str:
    """A part per server: how its requests ended, what is left, what grew."""
    return "\n\n".join(_told(line) for line in latest(found))


def _told(line: Line) -> str:
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(line["outcomes"].items()))
    closed = ", ".join(f"{line['closed'][state]} {state}" for state in STATES if state in line["closed"])
    rows = [["rank", "", "second tenth", "last tenth", "ratio"]]
    for rank, of_rank in enumerate(line["growth"]):
        for name, (before, after, ratio) in of_rank.items():
            rows.append([str(rank), QUANTITIES[name], f"{before:,.1f}", f"{after:,.1f}", f"{ratio:.3f}"])
    sent = f"{line['requests']:,} requests in {line['seconds']:,.0f} s"
    return "\n".join(
        [
            f"{line['server']}, {line['ranks']} ranks, {sent}: {ends}",
            f"closed while: {closed or '-'}; ranks stopped {line['stops']} times; exit status {line['status']}",
            *(f"told {count} times: {reason}" for reason, count in line["reasons"].items()),
            text_table(rows, left=(0, 1)).rstrip(),
            *(f"problem: {problem}" for problem in line["problems"]),
            "every request was answered or told why not" if not line["problems"] else "not as it should be",
        ]
    )


COLOURS = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE)


def picture(found: list[Line]) -> bytes:
    """Memory of each rank over time, and requests by how they ended; a row per server."""
    chosen = latest(found)
    figure = new_figure(11, 0.5 + 3.4 * len(chosen))
    for line, (memory, ends) in zip(chosen, figure.subplots(len(chosen), 2, squeeze=False), strict=True):
        minutes = [s / 60 for s, _, _ in line["samples"]]
        for kind, (name, dashes) in enumerate((("RSS", "-"), ("PSS", ":"))):
            for rank in range(line["ranks"] if minutes else 0):
                values = [ranks[rank][kind] for _, _, ranks in line["samples"]]
                colour = COLOURS[rank % len(COLOURS)]
                memory.plot(minutes, values, dashes, color=colour, label=f"rank {rank}, {name}")
        memory.set_ylim(bottom=0)
        style_axes(memory, title=f"{line['server']}, {line['ranks']} ranks", x="minutes", y="MiB")
        legend(memory)
        counts = sorted(line["outcomes"].items(), key=lambda each: each[1])
        bars = ends.barh([end[:40] for end, _ in counts], [count for _, count in counts], color=SKY)
        ends.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8.5)
        style_axes(ends, title="requests by how they ended", x="requests", grid="x")
    set_title(figure, "A server under load for a long time")
    return png(figure)


STUDY = Study(
    name="endurance",
    text=__doc__,
    has="outcomes",
    prepare=drain_s_of,
    measure=measure,
    table=table,
    verdict=lambda found, options: "the last run has problems, see above" if found[-1]["problems"] else None,
    pictures={"endurance.png": picture},
    options={
        "server": option(["model=smollm2"], "options of launch/serve.py", metavar="NAME=VALUE"),
        "ranks": option(2, "of the server"),
        "seconds": option(1800.0, "time in which requests are sent"),
        "requests": option(1, "requests that are sent at least, however long that takes"),
        "rate": option(1.0, "requests per second"),
        "lengths": option([16, 2000], "shortest and longest prompt in tokens, log-uniform", nargs=2),
        "new_tokens": option([1, 64], "least and most tokens of an answer, uniform", nargs=2),
        "vocabulary": option(10_000, "prompts are drawn from the token ids below it"),
        "cancelled": option(0.2, "share of requests whose client closes its connection"),
        "within_s": option(1.0, "a client closes at most so many seconds after its request has come to a state"),
        "slow_every": option(120.0, "seconds from one stop of a rank to the next; 0: none is stopped"),
        "slow_s": option(5.0, "seconds for which a rank is stopped"),
        "sample_s": option(5.0, "seconds between two samples of memory, threads and files"),
        "patience_s": option(600.0, "seconds after which a request that has not ended counts as hanging"),
        "log": option(None, "file for what the server says", metavar="FILE"),
        "seed": option(0, "of arrivals, lengths and closings"),
    },
)

if __name__ == "__main__":
    STUDY.main()
