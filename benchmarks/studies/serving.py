"""How many requests does a running server answer in time? TTFT, TPOT and inter-token latency over a sweep of rates.

    torchrun --nproc-per-node=2 launch/serve.py model=smollm2 serve.max_waiting=1000 serve.max_per_client=1000 &
    python -m benchmarks.studies.serving --workloads mixed --rates 0.05 0.1 0.2 --seconds 600

With `--against` another server gets the same requests after the first one, then the first one again, and so on (A B A
B), `--rounds` times. So two settings are compared beside each other, such as with and without a prefix tree:

    torchrun --nproc-per-node=2 --master-port=29501 launch/serve.py model=smollm2 ranks.threads=1 &
    torchrun --nproc-per-node=2 --master-port=29502 launch/serve.py model=smollm2 ranks.threads=1 serve.port=8001 \
        serve.prefix_cache_bytes=0 &
    python -m benchmarks.studies.serving --server tree --against none=http://127.0.0.1:8001 --rounds 2 \
        --workloads turns document --rates 0.1 --seconds 50 --length 2000 --new_tokens 32

Each round has texts of its own, so what a server has kept of earlier rounds is of no use.

The short form, which compares the servers of two commits in five minutes, is `python -m benchmarks.studies.capacity`.

Sessions arrive at random (Poisson) at each rate, whether or not earlier ones have been answered: an open loop. The
definitions are those of `vllm bench serve`: TTFT is the time to the first token of a stream, TPOT is (the last token's
time - TTFT) / (tokens - 1) of a request, and inter-token latencies are the times between a stream's events. A request
is good if its TTFT is at most `--ttft` plus `--ttft_per_token` per prompt token and `--ttft_per_square` per squared
one, and 99% of its gaps between events are at most `--itl`; refused requests are not good. Prompts are random token
ids, and answers have a fixed length. Several addresses are replicas, which get the requests in turn.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness.declared import Curves, Panel, Table, from_zero
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option


@dataclass(frozen=True)
class Turn:
    """A request of a session: its prompt, and the pause before it in seconds."""

    ids: list[int]
    pause_s: float = 0.0


Session = list[Turn]
Draw = random.Random


PAUSE_S = 5.0
"""Mean pause between two turns."""


def uniform(draw: Draw, length: int, vocabulary: int, shared: Draw | None = None) -> Session:
    """One prompt of this length."""
    return [Turn(_ids(draw, length, vocabulary))]


def mixed(draw: Draw, length: int, vocabulary: int, shared: Draw) -> Session:
    """One prompt: nine of ten have a sixteenth of the length."""
    return uniform(draw, length if draw.random() < 0.1 else max(1, length // 16), vocabulary)


def spread(draw: Draw, length: int, vocabulary: int, shared: Draw) -> Session:
    """One prompt of a sixteenth of the length to all of it, the logarithm of which is uniform."""
    return uniform(draw, round(length * 16 ** (draw.random() - 1)), vocabulary)


def turns(draw: Draw, length: int, vocabulary: int, shared: Draw) -> Session:
    """Four turns over a growing text, with pauses. The server's answers are not in it."""
    text = _ids(draw, length, vocabulary)
    pauses_s = [0.0, *(draw.expovariate(1 / PAUSE_S) for _ in range(3))]
    return [Turn(text[: length * turn // 4], pause_s) for turn, pause_s in enumerate(pauses_s, start=1)]


def document(draw: Draw, length: int, vocabulary: int, shared: Draw) -> Session:
    """A question about the same document as all others of a measurement ask about."""
    return [Turn(_ids(shared, length, vocabulary) + _ids(draw, 16, vocabulary))]


WORKLOADS: dict[str, Callable[[Draw, int, int, Draw], Session]] = {
    each.__name__: each for each in (uniform, mixed, spread, turns, document)
}
"""Sessions by name. `shared` draws the same for all sessions of a measurement."""


def _ids(draw: Draw, length: int, vocabulary: int) -> list[int]:
    return draw.choices(range(vocabulary), k=length)


@dataclass
class Reply:
    """Outcome of one request.

    Attributes:
        status: of HTTP; 0: no answer.
        cached_tokens: of the prompt, those that the server did not compute, as it said.
        events_s: seconds after its start at which events came.
        predicted_s: what the server predicted for the first of them; None if it did not.
        began_s: `time.perf_counter` of its start.
        state: as the server last told it: "sent" (nothing yet), "waiting", "prefill" or "decoding".
        reason: why there is no whole answer, in the server's words; "" if it gave none.
    """

    prompt_tokens: int
    status: int = 0
    events_s: list[float] = field(default_factory=list)
    new_tokens: int = 0
    cached_tokens: int = 0
    predicted_s: float | None = None
    began_s: float = field(default_factory=time.perf_counter)
    state: str = "sent"
    reason: str = ""

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.new_tokens > 0

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.events_s)]

    def gaps_beside_s(self, others: Sequence[Reply]) -> list[float]:
        """The gaps in which one of the others waited for its first token."""
        spans = [(each.began_s, each.began_s + each.events_s[0]) for each in others if each is not self]
        events = [self.began_s + event_s for event_s in self.events_s]
        return [b - a for a, b in pairwise(events) if any(begin < b and a < end for begin, end in spans)]


async def ask(
    url: str, ids: list[int], new_tokens: int, key: str | None, outcome: Reply | None = None, **fields: Any
) -> Reply:
    """Stream one answer, over a connection of its own. A given outcome is filled in while the answer comes.

    Args:
        fields: more of the request's; with `return_token_ids`, which vLLM takes, a token without text is an event, too.
    """
    outcome, parts = Reply(len(ids)) if outcome is None else outcome, urlsplit(url)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": ids, "max_tokens": new_tokens, "ignore_eos": True, **usage, **fields}).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"{authorization}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**24)
        try:
            writer.write(head.encode() + body)
            status = int((await reader.readline()).split()[1])
            async for line in reader:
                if line.startswith(b"x-predicted-ttft: "):
                    outcome.predicted_s = float(line.split()[1])
                elif line.startswith(b": "):  # a comment while there is no token
                    outcome.state = line[2:].partition(b",")[0].strip().decode()
                elif line.startswith(b'{"error"'):  # the body of a refusal
                    outcome.reason = json.loads(line)["error"]["message"]
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.reason = event["error"]["message"]
                    return outcome
                if event.get("usage"):
                    outcome.new_tokens = event["usage"]["completion_tokens"]
                    outcome.cached_tokens = event["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
                elif (choice := event["choices"][0])["text"] or choice.get("token_ids"):
                    outcome.events_s.append(time.perf_counter() - outcome.began_s)
                    outcome.state = "decoding"
            outcome.status = status
        finally:
            writer.close()
    except (OSError, IndexError, ValueError):  # the server is gone
        pass
    return outcome


async def _ask_in_turn(urls: Iterator[str], ids: list[int], **about: Any) -> Reply:
    return await ask(next(urls), ids, **about)


async def load(
    sessions: list[Session], starts_s: list[float], asking: Callable[[list[int]], Awaitable[Reply]]
) -> list[Reply]:
    """Outcomes of all requests. Each session begins at its time, whatever the others do."""
    outcomes: list[Reply] = []

    async def run(session: Session, start_s: float) -> None:
        await asyncio.sleep(start_s)
        for turn in session:
            await asyncio.sleep(turn.pause_s)
            outcomes.append(await asking(turn.ids))

    await asyncio.gather(*(run(session, start_s) for session, start_s in zip(sessions, starts_s, strict=True)))
    return outcomes


def servers(options: Namespace) -> dict[str, list[str]]:
    """Addresses of each server by its name. Raises: ValueError: --against is no other server."""
    found = {options.server: options.url}
    if options.against is not None:
        name, _, url = options.against.partition("=")
        if not url.startswith("http") or name == options.server:
            raise ValueError(f"--against {options.against} must be NAME=http://..., with another name than --server")
        found[name] = [url]
    return found


def variants(options: Namespace) -> Iterator[Variant]:
    """Each workload at each rate: in each round the servers, one after the other."""
    for workload, rate, number in product(options.workloads, options.rates, range(options.rounds)):
        for name in servers(options):
            yield {"server": name, "workload": workload, "rate": rate, "round": number}


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """Measure one line. Every server gets the same requests in a round of one number."""
    workload, rate, number = variant["workload"], variant["rate"], variant["round"]
    urls = servers(options)[variant["server"]]
    named = f"{workload} {rate} {options.seed}" + (f" {number}" if number else "")
    draw = random.Random(named)
    starts_s, now_s = list[float](), draw.expovariate(rate)
    while now_s < options.seconds:
        starts_s.append(now_s)
        now_s += draw.expovariate(rate)
    make = WORKLOADS[workload]
    sessions = [make(draw, options.length, options.vocabulary, random.Random(f"shared {named}")) for _ in starts_s]
    before_s, began_s = rank_seconds(urls, options.key), time.perf_counter()
    asking = partial(_ask_in_turn, cycle(urls), new_tokens=options.new_tokens, key=options.key)
    outcomes = asyncio.run(load(sessions, starts_s, asking))
    slo = {name: getattr(options, name) for name in ("ttft", "ttft_per_token", "ttft_per_square", "itl")}
    seconds, after_s = time.perf_counter() - began_s, rank_seconds(urls, options.key)
    about = {"length": options.length, "new_tokens": options.new_tokens, "slo": slo}
    about |= {"rank_s": {name: after_s[name] - before_s.get(name, 0.0) for name in after_s}}
    yield variant | about | summary(outcomes, seconds, longest=options.length, **slo)


def rank_seconds(urls: list[str], key: str | None) -> dict[str, float]:
    """Seconds that ranks have spent so far: "1 decoding" is that of the ranks 1 of all replicas."""
    found: dict[str, float] = {}
    for url in urls:
        text = fetched(f"{url}/metrics", key).decode()
        for rank, doing, seconds in re.findall(r'rank_seconds_total\{rank="(\d+)",doing="(\w+)"\} (\S+)', text):
            found[f"{rank} {doing}"] = found.get(f"{rank} {doing}", 0.0) + float(seconds)
    return found


def fetched(url: str, key: str | None) -> bytes:
    """A server's answer to GET."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
    return content


def summary(
    outcomes: list[Reply],
    seconds: float,
    *,
    ttft: float,
    ttft_per_token: float,
    ttft_per_square: float = 0.0,
    itl: float,
    longest: int | None = None,
) -> Line:
    """Figures of one run. Percentiles are None where nothing was answered.

    `itl_beside_s` is of the gaps in which another prompt, of at least half of `longest` tokens, waited for its first
    token: decoding beside a long prefill.
    """
    answered = [each for each in outcomes if each.is_answered]

    def is_good(each: Reply) -> bool:
        limit_s = ttft + ttft_per_token * each.prompt_tokens + ttft_per_square * each.prompt_tokens**2
        return each.events_s[0] <= limit_s and float(np.percentile(each.gaps_s or [0.0], 99)) <= itl

    good = [each for each in answered if each.events_s and is_good(each)]
    long = [each for each in answered if each.events_s and longest and each.prompt_tokens >= longest / 2]
    several = [each for each in answered if each.events_s and each.new_tokens > 1]
    tpot_s = [(each.events_s[-1] - each.events_s[0]) / (each.new_tokens - 1) for each in several]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "refused": sum(each.status in (429, 503) for each in outcomes),
        "seconds": seconds,
        "prompt_tokens": sum(each.prompt_tokens for each in answered),
        "cached_tokens": sum(each.cached_tokens for each in answered),
        "goodput": len(good) / seconds,
        "ttft_s": percentiles([each.events_s[0] for each in answered if each.events_s]),
        "tpot_s": percentiles(tpot_s),
        "itl_s": percentiles([gap for each in answered for gap in each.gaps_s]),
        "itl_beside_s": percentiles([gap for each in answered for gap in each.gaps_beside_s(long)]),
        "ttft_over_predicted": percentiles(
            [each.events_s[0] / each.predicted_s for each in several if each.predicted_s]
        ),
        "ttft_by_length": [[each.prompt_tokens, each.events_s[0]] for each in several],
    }


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Median, 90%, 99% and maximum."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p99", "max"))
    return {name: float(np.percentile(values, q)) for name, q in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))}


def percentile_of(name: str, percentile: str) -> Callable[[Line], float | None]:
    """A percentile of a figure; None where nothing was answered, and in lines from before the figure."""
    return lambda line: line.get(name, {}).get(percentile)


def seconds(name: str, percentile: str) -> Callable[[Line], str]:
    """A column: a percentile in seconds."""
    return lambda line: "-" if (value := percentile_of(name, percentile)(line)) is None else f"{value:.2f} s"


def predicted(line: Line) -> str:
    """The median of TTFT over the server's prediction."""
    ratio = percentile_of("ttft_over_predicted", "p50")(line)
    return "-" if ratio is None else f"{ratio:.2f}"


def hits(line: Line) -> str:
    """Share of the prompts' tokens that the server had."""
    return f"{line['cached_tokens'] / line['prompt_tokens']:.0%}" if line.get("prompt_tokens") else "-"


def computed(line: Line) -> str:
    """Tokens of the prompts that the server did not have."""
    return f"{line['prompt_tokens'] - line['cached_tokens']:,}" if line.get("prompt_tokens") else "-"


TABLE = Table(
    lines=lambda found: newest("server", "workload", "rate", "length", "round")([{"round": 0, **x} for x in found]),
    columns={
        "server": lambda line: line["server"],
        "workload": lambda line: line["workload"],
        "rate": lambda line: f"{line['rate']:g}",
        "sent": lambda line: str(line["requests"]),
        "answered": lambda line: str(line["answered"]),
        "refused": lambda line: str(line["refused"]),
        "goodput": lambda line: f"{line['goodput']:.3f}",
        "hits": hits,
        "computed": computed,
        "TTFT p50": seconds("ttft_s", "p50"),
        "TTFT p99": seconds("ttft_s", "p99"),
        "predicted": predicted,
        "ITL p99": seconds("itl_s", "p99"),
        "beside": seconds("itl_beside_s", "p99"),  # beside a long prefill
    },
    left=(0, 1),
)
PICTURE = Curves(
    title="A server under load",
    subject=lambda found: "by its set-up and workload, over the rate at which sessions begin",
    lines=newest("server", "workload", "rate", "length"),
    curve=lambda line: f"{line['server']}, {line['workload']}",
    x_label="sessions that begin, per s",
    x=lambda line: float(line["rate"]),
    panels=lambda found: [
        Panel("Requests that were answered in time", "requests per s", lambda line: line["goodput"] or None),
        Panel("Time to first token, 99th percentile", "seconds", percentile_of("ttft_s", "p99")),
        Panel("Time between tokens, 99th percentile", "seconds", percentile_of("itl_s", "p99")),
    ],
    least=2,  # what has one rate alone is in the table only
    finish=from_zero,
)

STUDY = Study(
    name="serving",
    text=__doc__,
    has="goodput",
    variants=variants,
    measure=measure,
    table=TABLE,
    pictures={"serving.png": PICTURE},
    options={
        "url": option(["http://127.0.0.1:8000"], "address of the server, or of replicas"),
        "key": option(None, "its key"),
        "server": option("default", "what its settings are called, in table and picture"),
        "against": option(None, "another server, which is measured in turn with the first", metavar="NAME=URL"),
        "rounds": option(1, "measurements of each workload and rate on each server, with other texts"),
        "workloads": option(list(WORKLOADS), "workloads", choices=list(WORKLOADS)),
        "rates": option([0.05, 0.1, 0.2], "sessions per second"),
        "seconds": option(300.0, "time in which sessions arrive, per workload and rate"),
        "length": option(4000, "longest prompt in tokens"),
        "vocabulary": option(10_000, "prompts are drawn from the token ids below it"),
        "new_tokens": option(128, "tokens of an answer"),
        "ttft": option(1.0, "most seconds to the first token of a good request"),
        "ttft_per_token": option(0.01, "and per token of its prompt"),
        "ttft_per_square": option(0.0, "and per squared token of its prompt"),
        "itl": option(1.0, "in seconds; 99%% of the gaps between events of a good request are at most this long"),
        "seed": option(0, "of arrivals and prompts"),
    },
)


if __name__ == "__main__":
    STUDY.main()
