"""What does it bring vLLM that Runahead computes its prompts? TTFT, the copy's share, pauses of a second client.

    python -m benchmarks.studies.handover
    python -m benchmarks.studies.handover --lengths 1024 4096 --rounds 3
    python -m benchmarks.studies.handover --check

SmolLM2 in float32 is served by vLLM alone with --threads threads, by vLLM with the connector and as many ranks of ours
of one thread, and by ours alone. All stay loaded on the same cores and take turns. So the study says what the way
through a file costs, not what a chain brings on hosts that would be idle. In each round each has a new prompt of random
tokens of each length, whose first token is awaited through HTTP. The copy's seconds and bytes are those of vLLM's log.

Then a second client has a long answer from vLLM, without and with us, while the first one sends such a prompt: the
times between the second one's tokens until the first one's first token. The first prompts are not counted.

`--check` sends ten prompts of text, of 1,000 to 6,000 tokens, to both vLLMs by the official client of openai, and fails
unless all answers have the same tokens and nine or more were loaded, as the log says.

vLLM is installed into the cache folder, as for the study of peers; what servers say is kept beside it. Appends JSON
lines to benchmarks/results/handover.jsonl; the same command goes on from them after an interruption, as long as our
code, the machine and the options are the same. The table is written into docs/engines.md. It needs cores that are
otherwise idle: about three minutes a round, and two to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import IO, Any, Self, TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT, free_port
from benchmarks.harness.random_prompts import random_ids
from benchmarks.harness.study import Study, Variant, errors_in_one_line, option
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.endurance import START_S, Server
from benchmarks.studies.peers.environment import peers_folder, python_with
from benchmarks.studies.peers.peer import PEERS
from benchmarks.studies.serving import Reply, ask, fetched
from launch.program.launcher import end_with_parent
from runahead.config import ModelOptions
from runahead.model.loading import smollm2

ALONE, WITH_OURS, OURS = "vLLM alone", "vLLM, prompts by ours", "ours alone"
T = TypeVar("T")
VARIANTS = (ALONE, WITH_OURS, OURS)
MIN_TOKENS = 512
"""Shorter prompts are vLLM's alone, such as the second client's; by default those below 1,024 are."""
ROOM = 8192
"""Tokens of SmolLM2's longest text."""
CLIENT_TOKENS, EVENTS_BEFORE = 64, 40
"""Length of the second client's prompt, and the tokens that it has before the long prompt comes."""
CHECKED = tuple(range(1000, 6001, 555))
"""Lengths of the prompts of --check."""
CHECKED_NEW, LEAST_LOADED = 32, 9
FEW = 8
"""New tokens where the first one counts: ours sends no event for one without text."""
ANSWER_S = 300.0
"""Seconds within which a first token comes, or the study ends."""
LOG_S = 5.0
"""Seconds after an answer within which vLLM's log has its line."""

LOADED = re.compile(r"runahead: \S+: asked for \d+ tokens, waited (\S+) s, loaded (\d+) \((\S+) MB in (\S+) s\)")
NOT_LOADED = re.compile(r"runahead: \S+: (?:asked for \d+ tokens, waited \S+ s, given up|not asked for)[^\n]*")


class VLLM:
    """vLLM's HTTP server, in processes of its own on a free port. Use it in a `with` block, and wait for `ready`.

    Args:
        log: file for what it says.
        ours: address of our server that it asks for prompts; None: it computes them.

    Attributes:
        url: its address.
    """

    def __init__(self, python: Path, model: Path, threads: int, log: IO[bytes], ours: str | None) -> None:
        port = free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", log
        program = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        options = ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(ROOM), "--max-num-seqs", "4"]
        if ours is not None:
            options += ["--kv-transfer-config", json.dumps(connector(ours))]
        cores = sorted(os.sched_getaffinity(0))[:threads]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT / "integrations" / "vllm"),
            "PYTHONSAFEPATH": "1",
        }
        self._process = subprocess.Popen(
            [*program, *options],
            env=os.environ | environment,
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with suppress(ProcessLookupError):  # what is left of it, its engine among it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ready(self) -> None:
        """Wait until it answers. Raises: ValueError: it has ended, or takes too long."""
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                fetched(f"{self.url}/health", None)
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = [line for line in self.said.splitlines() if "Error" in line] or self.said.splitlines()
                raise ValueError(f"vLLM did not start: {said[-1] if said else 'it said nothing'}")
            time.sleep(0.2)

    @property
    def said(self) -> str:
        """Text that it has printed."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def connector(ours: str) -> dict[str, Any]:
    """vLLM's --kv-transfer-config."""
    return {
        "kv_connector": "RunaheadConnector",
        "kv_connector_module_path": "runahead_vllm.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"server": ours, "min_tokens": MIN_TOKENS},
    }


def loads(said: str) -> list[Line]:
    """What a log says of prompts, in their order: waits and loads, or in `not_loaded` why there was none."""
    found = list[Line]()
    for text in said.splitlines():
        if match := LOADED.search(text):
            waited_s, tokens, megabytes, load_s = match.groups()
            loaded = {"waited_s": float(waited_s), "load_s": float(load_s)}
            found.append(loaded | {"tokens_loaded": int(tokens), "loaded_mb": float(megabytes)})
        elif match := NOT_LOADED.search(text):
            found.append({"not_loaded": match[0]})
    return found


@dataclass(frozen=True, kw_only=True)
class Served:
    """The servers, by the names of the variants.

    Attributes:
        urls: their addresses.
        said: text that vLLM with the connector has printed.
        model: folder of the model.
        key: of everything that affects a measurement.
        done: `place` of each line that is there already.
    """

    urls: Mapping[str, str]
    said: Callable[[], str]
    model: Path
    key: str = ""
    done: Collection[tuple[Any, ...]] = ()

    def loaded_since(self, before: int) -> Line:
        """What the log says of the prompt after so many."""
        deadline = time.monotonic() + LOG_S
        while len(found := loads(self.said())) <= before:
            if time.monotonic() > deadline:
                return {"not_loaded": "the log has no line"}
            time.sleep(0.02)
        return found[before]


@contextmanager
def served(options: Namespace) -> Iterator[Served]:
    """Start all servers. Raises: ValueError: vLLM cannot be installed, or does not start."""
    peer = PEERS["vllm"]
    python = python_with(peer.program.stem, peer.packages, peer.without)
    model = smollm2.find(ModelOptions(), weights=True, progress=True).folder
    with ExitStack() as undo:
        # A memory file system, where there is one.
        shared = Path("/dev/shm")
        folder = tempfile.mkdtemp(prefix="runahead-study-", dir=shared if shared.is_dir() else None)
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        peers_folder().mkdir(parents=True, exist_ok=True)
        names = ("ours", "alone", "connector")  # what they say stays there, for a run that ends early
        logs = [undo.enter_context((peers_folder() / f"handover-{name}.log").open("w+b")) for name in names]
        handover = [f"serve.handover={folder}", f"serve.handover_bytes={2**31}", f"serve.prefix_cache_bytes={2**30}"]
        given = [*options.server, "ranks.threads=1", "serve.log=false", *handover]
        ours = undo.enter_context(Server(given, options.threads, logs[0])).url
        start = partial(VLLM, python, model, options.threads)
        both = [undo.enter_context(start(log, url)) for log, url in zip(logs[1:], (None, ours), strict=True)]
        for each in both:
            each.ready()
        urls = {ALONE: both[0].url, WITH_OURS: both[1].url, OURS: ours}
        key = key_of(options)
        done = {place(line) for line in lines.read(options.lines, option="--lines", kind="threads")}
        measured = Served(urls=urls, said=lambda: both[1].said, model=model, key=key, done=done)
        if not options.check:
            warm(options, measured)
        yield measured


def key_of(options: Namespace) -> str:
    """Key of a run's lines, which go together."""
    about = {name: getattr(options, name) for name in ("threads", "warmup", "rest", "server", "check")}
    known = {"code": machine.code(), "hardware": machine.hardware(), "kernels": machine.has_kernels()}
    return lines.key(about | known)


def place(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a line from the others of its key."""
    return tuple(line.get(name) for name in ("key", "checked", "kind", "server", "length", "round"))


def warm(options: Namespace, servers: Served) -> None:
    """Send each server prompts that are not counted."""
    turns = list(product(options.lengths, range(options.warmup), VARIANTS))
    for length, _, name in tqdm(turns, desc="warm-up", unit="prompt", disable=None):
        first_token(options, servers, name, new_ids(length))


SEEDS = count(time.time_ns() % 2**40)


def new_ids(length: int) -> list[int]:
    """Token ids that no server has seen, in this run or before it."""
    return random_ids(length, smollm2_vocabulary(), seed=next(SEEDS) * ROOM)


def smollm2_vocabulary() -> int:
    """Size of the model's vocabulary."""
    model = smollm2.find(ModelOptions(), weights=True, progress=False).folder
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


def variants(options: Namespace) -> Iterator[Variant]:
    """Prompts of --check, or in each round each length. Raises: ValueError: an option is out of range."""
    if min(options.rounds, options.threads, *options.lengths) < 1 or options.warmup < 0 or options.rest < 0:
        raise ValueError("--rounds, --threads and --lengths must be at least 1, --warmup and --rest at least 0")
    if max(options.lengths) >= ROOM:
        raise ValueError(f"--lengths must be below {ROOM}, the longest text of the model")
    if options.check:
        yield from ({"checked": length} for length in CHECKED)
        return
    yield from (
        {"kind": kind, "round": number, "length": length}
        for number, length, kind in product(range(options.rounds), options.lengths, ("first token", "beside"))
    )


def measure(options: Namespace, servers: Served, variant: Variant) -> Iterator[Line]:
    """All servers' times of one prompt each."""
    about = {"key": servers.key, "threads": options.threads, "given": options.server} | variant
    with errors_in_one_line():
        if options.check:
            if place(about) not in servers.done:
                yield about | compared(servers, variant["checked"])
            return
        beside = variant["kind"] == "beside"
        names = [name for name in VARIANTS if name != OURS] if beside else list(VARIANTS)
        for name in names if variant["round"] % 2 == 0 else reversed(names):
            line = about | {"server": name}
            if place(line) not in servers.done:
                ids = new_ids(variant["length"])
                yield line | (pauses if beside else first_token)(options, servers, name, ids)


def first_token(options: Namespace, servers: Served, name: str, ids: list[int]) -> Line:
    """TTFT of a prompt, and what the log says of it. Raises: ValueError: there was no answer."""
    time.sleep(options.rest)  # threads of the server before stop spinning
    before = len(loads(servers.said()))
    found = asyncio.run(_within(_asked(servers, name, ids, FEW), name))
    if not found.events_s:
        raise ValueError(f"{name} did not answer {len(ids)} tokens: {found.reason or f'status {found.status}'}")
    return {"ttft_s": found.events_s[0]} | (servers.loaded_since(before) if name == WITH_OURS else {})


def pauses(options: Namespace, servers: Served, name: str, ids: list[int]) -> Line:
    """A second client's seconds between tokens, before a prompt comes and until its first token."""
    time.sleep(options.rest)
    before = len(loads(servers.said()))
    second, first = asyncio.run(_within(_beside(servers, name, ids), name))
    if not first.events_s:
        raise ValueError(f"{name} did not answer {len(ids)} tokens: {first.reason or f'status {first.status}'}")
    log = loads(servers.said())[before:]  # the second client's line is before the prompt's
    since_s = first.began_s - second.began_s
    quiet = [gap for gap, at in zip(second.gaps_s, second.events_s[1:], strict=True) if at < since_s]
    return {
        "ttft_s": first.events_s[0],
        "gaps_s": [round(gap, 5) for gap in second.gaps_beside_s([first])],
        "quiet_s": median(quiet),
    } | next((each for each in log if "waited_s" in each), {})


async def _within(answers: Coroutine[Any, Any, T], name: str) -> T:
    """Answers that come in time. Raises: ValueError."""
    try:
        return await asyncio.wait_for(answers, ANSWER_S)
    except TimeoutError as error:
        raise ValueError(f"{name} has not answered within {ANSWER_S:g} s") from error


async def _asked(servers: Served, name: str, ids: list[int], new_tokens: int, outcome: Reply | None = None) -> Reply:
    fields = {} if name == OURS else {"return_token_ids": True}  # of which ours has none
    return await ask(servers.urls[name], ids, new_tokens, None, outcome, temperature=0.0, **fields)


async def _beside(servers: Served, name: str, ids: list[int]) -> tuple[Reply, Reply]:
    """A client with a long answer, and one whose prompt comes while it decodes."""
    second = Reply(CLIENT_TOKENS)
    decoding = asyncio.create_task(
        _asked(servers, name, new_ids(CLIENT_TOKENS), ROOM - 2 * CLIENT_TOKENS, outcome=second)
    )
    try:
        while len(second.events_s) < EVENTS_BEFORE:
            if decoding.done():
                raise ValueError(f"{name} did not answer the second client: {second.reason}")
            await asyncio.sleep(0.01)
        first = await _asked(servers, name, ids, 1)
        await asyncio.sleep(0.2)  # the gap in which the first token came has an end
    finally:
        decoding.cancel()
        with suppress(asyncio.CancelledError):
            await decoding
    return second, first


def compared(servers: Served, length: int) -> Line:
    """The answers of both vLLMs to a text, as the official client has them."""
    from openai import OpenAI

    ids, before = text_ids(servers.model, length), len(loads(servers.said()))
    answers = list[list[int]]()
    for name in (ALONE, WITH_OURS):
        client = OpenAI(base_url=f"{servers.urls[name]}/v1", api_key="none", timeout=300, max_retries=0)
        [model] = client.models.list().data
        asked = {"return_token_ids": True, "ignore_eos": True}
        got = client.completions.create(
            model=model.id, prompt=ids, max_tokens=CHECKED_NEW, temperature=0.0, extra_body=asked
        )
        answers.append((got.choices[0].model_extra or {})["token_ids"])
    equal = answers[0] == answers[1] and len(answers[0]) == CHECKED_NEW
    return {"equal": equal, "tokens": answers[1]} | servers.loaded_since(before)


def text_ids(model: Path, length: int) -> list[int]:
    """Tokens of text from this project's pages, of another place for each length."""
    from transformers import AutoTokenizer

    pages = sorted((ROOT / "docs").glob("*.md"))
    ids: list[int] = AutoTokenizer.from_pretrained(model)("".join(page.read_text("utf-8") for page in pages)).input_ids
    return ids[3 * length : 4 * length]


def of_server(found: Sequence[Line], kind: str, server: str, length: int) -> list[Line]:
    """Lines of a kind, server and length."""
    return [line for line in found if (line["kind"], line["server"], line["length"]) == (kind, server, length)]


def cell(values: Sequence[float], form: str) -> str:
    """A median."""
    return format(median(values), form) if values else "-"


def newest(found: Sequence[Line], *, checks: bool) -> list[Line]:
    """The lines of the newest key, of a check or of times; none if there are none."""
    of_kind = [line for line in found if ("checked" in line) == checks]
    return [line for line in of_kind if line["key"] == of_kind[-1]["key"]]


def table(found: list[Line]) -> str:
    """The newest times in Markdown, and what the newest check found."""
    run, check = newest(found, checks=False), newest(found, checks=True)
    told = []
    if run:
        told.append(times(run))
    if check:
        same, loaded = (sum(map(bool, each)) for each in ([line["equal"] for line in check], checked_loaded(check)))
        told.append(
            f"Of {len(check)} prompts of {min(CHECKED):,} to {max(CHECKED):,} tokens {same} had the answer of vLLM "
            f"alone, token by token, and {loaded} were loaded ({lines.measured(check)}).\n"
        )
    return "\n".join(told)


def times(run: list[Line]) -> str:
    """Times of one key's lines."""
    lengths = sorted({line["length"] for line in run})
    last = run[-1]
    first: Rows = [("seconds to the first token", *(f"{length:,} tokens" for length in lengths))]
    for server in VARIANTS:
        times = [[line["ttft_s"] for line in of_server(run, "first token", server, length)] for length in lengths]
        first.append((server, *(cell(each, ".2f") for each in times)))
    for shown, name, form in (
        ("of it waiting for the file", "waited_s", ".2f"),
        ("of it the copy into vLLM", "load_s", ".2f"),
        ("MB copied", "loaded_mb", ".0f"),
    ):
        by_length = [of_server(run, "first token", WITH_OURS, length) for length in lengths]
        first.append((shown, *(cell([line[name] for line in each if name in line], form) for each in by_length)))
    beside: Rows = [("ms between a second client's tokens", "median", "95%", "longest", "first client's TTFT")]
    for length, server in product(lengths, (ALONE, WITH_OURS)):
        of_both = of_server(run, "beside", server, length)
        if not of_both:
            continue
        gaps = [1e3 * gap for line in of_both for gap in line["gaps_s"]]
        cells = [f"{value:.0f}" for value in (*np.percentile(gaps, [50, 95]), max(gaps))] if gaps else ["-"] * 3
        waits = [line["ttft_s"] for line in of_both]
        beside.append((f"{server}, beside {length:,} tokens", *cells, f"{cell(waits, '.2f')} s"))
    quiet = [1e3 * line["quiet_s"] for line in run if line["kind"] == "beside"]
    rounds = 1 + max(line["round"] for line in run)
    heading = (
        f"*Measured {lines.measured(run)}.* {last['hardware']['cpu']}, {last['threads']} cores that all share; "
        f"{rounds} rounds, medians."
    )
    before = f" Before the prompt came a token took {median(quiet):.0f} ms." if quiet else ""
    return f"{heading}{before}\n\n{markdown(first)}\n{markdown(beside)}"


def checked_loaded(run: Sequence[Line]) -> list[bool]:
    """Of prompts of a check, whether all but the last token was loaded."""
    return [line.get("tokens_loaded") == line["checked"] - 1 for line in run]


def verdict(found: list[Line], options: Namespace) -> str | None:
    """What the last check found wrong."""
    run = newest(found, checks=True)
    if not options.check or not run:
        return None
    if wrong := [line["checked"] for line in run if not line["equal"]]:
        return f"the answers to prompts of {wrong} tokens differ from plain vLLM's"
    if (loaded := sum(checked_loaded(run))) < LEAST_LOADED:
        return f"only {loaded} of {len(run)} prompts were loaded"
    return None


STUDY = Study(
    name="handover",
    text=__doc__,
    has="threads",
    variants=variants,
    prepare=served,
    measure=measure,
    table=table,
    verdict=verdict,
    page="../engines.md",
    options={
        "lengths": option([1024, 4096, 8000], "tokens of the prompts"),
        "rounds": option(3),
        "threads": option(2, "of vLLM, and ranks of ours"),
        "warmup": option(1, "prompts of each length that do not count, of each server"),
        "rest": option(0.5, "seconds before each prompt, in which threads of the server before stop spinning"),
        "server": option(["model=smollm2"], "options of our server", metavar="NAME=VALUE"),
        "check": option(False, "compare answers with plain vLLM's, in place of times"),
    },
)

if __name__ == "__main__":
    STUDY.main()
