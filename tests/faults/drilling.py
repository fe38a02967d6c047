"""One drill from its start to what it left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.network import namespaces
from tests.faults import models
from tests.faults.disks import disk
from tests.faults.drills import DISK_KINDS, LAUNCHER_KINDS, NETWORK_KINDS, SILENT_KINDS, TIMEOUT_S, Drill
from tests.faults.job import HERE, START_S, Job

ROOT = HERE.parents[1]
PACKAGES = ("runahead", "launch", "policies", "partitioner", "benchmarks")
ALLOWED_S = TIMEOUT_S + 5.0

STARVED_BITS_PER_S = 500
NEW_TOKENS = 24
KEPT = '{"kept": true}'
"""Content of an earlier run's report."""


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a drill.

    Attributes:
        problems: what was not as it should be, one sentence each.
        skipped: why this machine cannot do it.
        gone_s: seconds from the fault, or from the start where it is there from the start, until all ranks were gone.
        lines: what the ranks said.
        errors: the end of what they and the launchers wrote to standard error, where something is wrong. It names
            folders of this machine, so it is in no file of results.
    """

    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    gone_s: float | None = None
    statuses: list[int | None] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    errors: str = ""

    @property
    def as_expected(self) -> bool:
        return not self.problems and self.skipped is None

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in vars(self).items() if name != "errors"}
        return {"as_expected": self.as_expected} | told


class Drilling:
    """Runs drills with a tiny model, in folders of their own below `folder`.

    Args:
        allowed_s: within this many seconds of the fault every rank is to be gone.
        patience_s: `ranks.timeout_s` where nobody is to be given up for silence.
    """

    def __init__(
        self, model: Path, folder: Path, *, allowed_s: float = ALLOWED_S, patience_s: float = TIMEOUT_S
    ) -> None:
        self._model, self._folder, self._allowed_s, self._patience_s = model, folder, allowed_s, patience_s
        self._answer: str | None = None

    def run(self, drill: Drill, name: str) -> Outcome:
        folder = self._folder / name
        (folder / "tmp").mkdir(parents=True)
        outcome = Outcome()
        with ExitStack() as undo:
            try:
                place = undo.enter_context(disk(folder / "disk", drill.kind)) if drill.kind in DISK_KINDS else folder
                job = undo.enter_context(self._job(drill, folder, place))
            except (PermissionError, ValueError) as error:
                outcome.skipped = str(error)
                return outcome
            hosts = [] if job.network is None else job.network.hosts
            try:
                self._do(drill, job, outcome)
            except TimeoutError as error:
                outcome.problems.append(str(error))
            self._look(drill, job, outcome)
        left = [host for host in hosts if (namespaces.FOLDER / host).exists()]
        outcome.problems += [f"namespace {host} is left" for host in left]
        return outcome

    def _job(self, drill: Drill, folder: Path, place: Path) -> Job:
        ids = folder / "ids.json"
        ids.write_text(json.dumps(list(models.PROMPT_IDS)))
        model = self._model
        if drill.kind == "NaN in weights":
            model = folder / "model"
            models.spoil(self._model, model, random.Random(repr(drill)).random())
        name, _, variant = drill.prefill.partition(" ")
        options = [
            *("model=hf", f"model.path={model}", f"prompt.ids_file={ids}", "ranks.device=cpu", f"prefill={name}"),
            "partition=even",  # faults happen in the prompt's forward pass, not in one that times layers
            *(f"generation.max_new_tokens={NEW_TOKENS}", "generation.ignore_eos=true"),
            f"ranks.timeout_s={TIMEOUT_S if drill.kind in SILENT_KINDS else self._patience_s}",
        ]
        if drill.tensor > 1:
            options.append(f"ranks.tensor={drill.tensor}")
        if variant == "copy":
            options.append("prefill.carrier=copy")
        elif name == "pipeline":
            options.append("prefill.chunk_tokens=16")
        elif variant == "sharded":
            options.append("decode=sharded")
        elif variant:
            options.append(f"prefill.{'transfer' if name == 'kv_runahead' else 'exchange'}={variant}")
        files = {"report": "run.json", "timeline": "trace.json"}
        places = {file: place if file == drill.file else folder for file in files}
        options += [f"{option}={places[option] / file}" for option, file in files.items()]
        if drill.kind not in DISK_KINDS:
            (folder / "run.json").write_text(KEPT)
        cache = None
        if drill.file == "fault report":
            options.append(f"ranks.fault_report={place / 'faults.json'}")
        elif drill.file == "cache":
            options = ["model=smollm2", *(option for option in options if not option.startswith("model"))]
            cache = place
        elif drill.file == "table":
            options = [
                *("-m", "partitioner.search", f"table={place / 'table.json'}", "model=hf", f"model.path={model}"),
                *(
                    "search.ranks=[2]",
                    "search.lengths=[64]",
                    "link.gbps=1",
                    "search.repeats=1",
                    "search.probe_layers=1",
                ),
                *("search.probe_chunks=[8,32]", "search.probe_prefixes=[32,64]", "search.max_loss=null"),
            ]
            return Job(drill, options, folder)
        # Faults are for a chain; a short prompt is computed sooner by one rank.
        chain = [] if any(option.startswith("partition=") for option in options) else ["partition.alone=false"]
        return Job(drill, [str(HERE / "faulty_infer.py"), *options, *chain], folder, cache=cache)

    def _do(self, drill: Drill, job: Job, outcome: Outcome) -> None:
        """Let the fault happen and all end."""
        began = time.monotonic()
        if drill.fault is None:
            gone_s = job.end(START_S)
            outcome.gone_s = time.monotonic() - began
        else:
            if not job.await_moment():
                outcome.problems.append("the job ended before its moment came")
            elif drill.kind == "delay of a rank":
                time.sleep(drill.seconds)
                os.kill(job.rank_process(drill.rank), signal.SIGCONT)
            elif drill.kind in NETWORK_KINDS:
                job.cut_link() if drill.kind == "link cut" else job.starve_link(STARVED_BITS_PER_S)
            elif drill.kind in LAUNCHER_KINDS:
                numbers = dict(zip(LAUNCHER_KINDS, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), strict=True))
                job.launchers[0].send_signal(numbers[drill.kind])
            if drill.fault["do"] == "tell":
                job.acted.touch()
            gone_s = outcome.gone_s = job.end(START_S)
            if gone_s is not None and not drill.is_answered and gone_s > self._allowed_s:
                outcome.problems.append(f"all ranks were gone only after {gone_s:.1f} s")
        if gone_s is None:
            outcome.problems.append(f"{len(job.processes())} processes did not end")
            job.kill()
        outcome.statuses = job.statuses
        outcome.lines = [line.replace(str(job.folder), "...") for line in job.lines]

    def _look(self, drill: Drill, job: Job, outcome: Outcome) -> None:
        """Look at the messages of the ranks, and at what they have left behind."""
        problems = outcome.problems
        if drill.is_answered:
            if any(outcome.statuses):
                problems.append(f"a rank that was only late ended the job with status {outcome.statuses}")
            if job.answer != self.answer():
                problems.append("the answer is not the right one")
        else:
            if not all(outcome.statuses):
                problems.append(f"exit status {outcome.statuses}")
            problems += said_wrong(drill, outcome.lines)
        if any(map(is_ours, re.findall(r'File "(.+?)", line', job.errors))):
            problems.append("a traceback was shown")
        problems += left_behind(job, place=job.folder)
        if not drill.is_answered and drill.kind not in DISK_KINDS and (job.folder / "run.json").read_text() != KEPT:
            problems.append("the report of an earlier run was touched")
        if problems:
            outcome.errors = job.errors[-10_000:]
            with suppress(OSError):
                (job.folder / "stderr").write_text(job.errors)

    def answer(self) -> str:
        """The answer of two ranks that nothing happens to."""
        if self._answer is None:
            plain = Drill(kind="delay of a rank", rank=-1)
            folder = self._folder / "plain"
            (folder / "tmp").mkdir(parents=True)
            with self._job(plain, folder, folder) as job:
                assert job.end(START_S) is not None
                assert job.statuses == [0], job.errors
                self._answer = job.answer
        return self._answer


NAMED = {
    "error in a rank": "a fault was injected",
    "no memory in a rank": "out of memory",
    "NaN in weights": "not numbers",
    "full disk": "report=|timeline=|table=|No space left|cannot be kept|needs .* MB|a fault was injected",
    "read-only folder": "report=|timeline=|ranks.fault_report=|table=|cannot be kept",
    "Ctrl-C": "interrupted",
    "SIGTERM to the launcher": "SIGTERM",
}
"""A pattern that some line has to match, by kind of fault."""

WAITED = (
    r"waited \d+ s for .*(the KV of layer \d+ .*rank \d|the hidden states of tokens \d+ to \d+ .*rank \d"
    r"|the attention of rank \d|the next token of rank \d"
    r"|the end of the generation)"
)
"""A pattern of what both ranks say when the link between them is gone."""


def said_wrong(drill: Drill, lines: list[str]) -> list[str]:
    """Messages that the ranks ought to have printed and did not."""
    if drill.kind == "kill -9 of the launcher":
        return []
    if not lines:
        return ["no rank said anything"]
    problems = []
    labels = [line.partition("]")[0] for line in lines]
    if len(set(labels)) < len(labels):
        problems.append("a rank said more than one line")
    others = [line.partition("] ")[2] for line in lines if not line.startswith(f"[rank {drill.rank}/")]
    if drill.kind in ("kill -9 of a rank", "stop of a rank"):
        if not any(f"{drill.name} " in line for line in others):
            problems.append(f"no line names {drill.name}")
        # What decodes a prompt that a killed rank has given to the end waits for nothing of it.
        may_not_wait = drill.kind == "kill -9 of a rank" and drill.moment == "decode" and drill.rank != drill.size - 1
        if not may_not_wait and not any(re.search("wait|SIGTERM", line) for line in others):
            problems.append("no line says what was waited for")
    elif drill.kind in NETWORK_KINDS:
        if len(lines) < 2 or not all(re.search(WAITED, line) for line in lines):
            problems.append("a rank does not say what it waited for")
    elif not any(re.search(NAMED[drill.kind], line) for line in lines):
        problems.append(f"no line says {NAMED[drill.kind]}")
    return problems


def is_ours(path: str) -> bool:
    """Is it a file of a package in this checkout, whatever the folders above are called?

    The launcher's own traceback is no problem, and its environment may be inside the checkout.
    """
    return any(Path(path).resolve().is_relative_to(ROOT / package) for package in PACKAGES)


def left_behind(job: Job, place: Path) -> list[str]:
    """Files that are not whole, or should not be there."""
    problems = [f"{path.name} is left" for path in place.rglob("*.part")]
    for path in place.glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            problems.append(f"{path.name} is half written")
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    ours = set(map(str, job.seen))
    return problems + [f"shared memory {name} is left" for name in names if ours & set(re.findall(r"\d+", name))]
