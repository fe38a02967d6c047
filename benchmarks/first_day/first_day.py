"""A first day from its options to its page: what launch/first_day.py does."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor import environment
from benchmarks.doctor.crew import RANKS_WITHOUT_GPUS, Crew, JobOutcome
from benchmarks.doctor.findings import Finding, Verdict, worst
from benchmarks.doctor.page import as_text
from benchmarks.doctor.tasks import plain
from benchmarks.first_day.figures import as_line, finding_of
from benchmarks.first_day.gpu_tests import FOLDER
from benchmarks.first_day.options import FirstDayRun
from benchmarks.first_day.parts import MOST_SHARING, PARTS, FirstDayPart, Where, chosen
from benchmarks.first_day.work import PartTask
from benchmarks.harness import machine
from runahead.config import Backend, Device
from runahead.files import ensure_writable, write_whole

PARTS_GROUP = "parts"
"""Group of the findings on the parts themselves."""

FIGURES = "figures.jsonl"
"""File of all findings, in the folder of the run."""


LAST_CHARACTERS = 200
"""End of the last line of a part that failed."""

SUMMARIES = {
    "good": "All parts that ran passed, and no figure is far from its estimate.",
    "short": "All parts that ran passed; figures far from their estimates:",
    "failed": "What failed, and figures far from their estimates:",
}
"""First sentence of the page, by verdict."""


def spend(run: FirstDayRun) -> int:
    """Run the parts on this machine, or on the launcher's machines, and write logs, figures and the page.

    Returns:
        the exit status: 0, or 1 if a part failed.

    Raises:
        ValueError: the folder has an earlier run or cannot be written, or a process did not start.
    """
    began_s, out = time.monotonic(), Path(run.first_day.out)
    num_gpus = 0 if run.ranks.device is Device.cpu else torch.cuda.device_count()
    crew = Crew.here(max(num_gpus, MOST_SHARING), logs=out.absolute())
    if crew.leads:
        if (out / FIGURES).exists():
            raise ValueError(f"first_day.out={out} has the figures and logs of an earlier run; name another folder")
        out.mkdir(parents=True, exist_ok=True)
        ensure_writable(out / "first_day.json", option="first_day.out")
    with crew.together():
        if not crew.leads:
            return 0
        day = FirstDay(run, crew, num_gpus, out.absolute(), began_s)
        day.run_all()
    print(as_text(day.page(), SUMMARIES), end="", flush=True)
    print(f"\nwritten to {out}: first_day.txt, first_day.json, {FIGURES}, and a folder per part", file=sys.stderr)
    return int(worst(day.findings) is Verdict.failed)


@dataclass
class FirstDay:
    """The parts in order, on the leading process.

    Attributes:
        num_gpus: of this host that may be used; 0 is a rehearsal on CPUs.
        findings: of all parts so far.
    """

    run: FirstDayRun
    crew: Crew
    num_gpus: int
    out: Path
    began_s: float
    findings: list[Finding] = field(default_factory=list)
    _read: int = 0

    def run_all(self) -> None:
        """Check the environment, then run the parts, unless something is wrong that would make them fail."""
        (self.out / FIGURES).write_text("", encoding="utf-8")
        local = [len(self.crew.local_ranks(rank)) for rank in range(self.crew.size)]
        facts, is_launched = self.crew.facts, self.crew.store is not None
        if not is_launched:  # one of the processes that share a GPU stands for all
            local, facts = [max(1, self.num_gpus)] * max(1, self.num_gpus), facts[: max(1, self.num_gpus)]
        examined = environment.Examined(facts=facts, local_ranks=local, uses_gpus=self.num_gpus > 0)
        self.findings += environment.check_environment(examined)
        blocked = {Where.hosts} if worst(self.findings) is Verdict.failed else set[Where]()
        here = [rank for rank, each in enumerate(facts) if each.place == facts[0].place]
        of_host = replace(examined, facts=[facts[rank] for rank in here], local_ranks=[local[rank] for rank in here])
        if worst(environment.check_environment(of_host)) is Verdict.failed:
            blocked |= set(Where)
        options = self.run.first_day
        wanted = chosen(options.parts) if options.parts else PARTS
        left_out = chosen(options.without)
        for part in (each for each in PARTS if each in wanted and each not in left_out):
            reason = "the environment has to be mended first" if part.where in blocked else self.why_not(part)
            if reason is None:
                self._run(part)
            else:
                self._conclude(part, Verdict.skipped, words=f"not run: {reason}")
            self._write()

    @property
    def left_s(self) -> float:
        """Seconds of the time budget that are left."""
        minutes = self.run.first_day.minutes
        return float("inf") if minutes is None else self.began_s + 60 * minutes - time.monotonic()

    def num_ranks(self, part: FirstDayPart) -> int:
        """Ranks that a part would have here; 0 if there are too few for it."""
        places = Counter(facts.place for facts in self.crew.facts)
        here = len(self.crew.local_ranks(0))
        if part.where is Where.hosts:  # on each of which ranks that share a model stand side by side
            fits = len(places) > 1 and all(num % part.num_shares == 0 for num in places.values())
            return self.crew.size if fits else 0
        if part.where is Where.gpu:
            return part.num_ranks if part.num_ranks <= here else 0
        if self.crew.store is None:
            here = self.num_gpus or RANKS_WITHOUT_GPUS
        stages = here // part.num_shares
        return stages * part.num_shares if stages > 1 else 0

    def why_not(self, part: FirstDayPart) -> str | None:
        """Why a part cannot run here, as the end of a sentence; None if it can."""
        if part.needs_gpu and not self.num_gpus:
            return "it needs a GPU"
        if self.num_ranks(part) == 0:
            return {
                Where.hosts: "it needs several hosts"
                + (f" with a multiple of {part.num_shares} GPUs each" if part.num_shares > 1 else "")
                + "; start it there by torchrun or srun",
                Where.host: f"it needs {2 * part.num_shares} GPUs on this host",
                Where.gpu: f"it needs {part.num_ranks} processes on this host; start it there without a launcher",
            }[part.where]
        missing = [module for module in part.modules if find_spec(module) is None]
        if missing:
            return f"it needs {' and '.join(missing)}; install with pip install {' '.join(missing)}"
        if part.name == "tests" and not FOLDER.is_dir():
            return "it needs a checkout, and this is an installed package"
        if part.takes_s > self.left_s:
            minutes = self.run.first_day.minutes
            return f"it takes about {part.takes_s:.0f} s and would not end within first_day.minutes={minutes:g}"
        return None

    def page(self) -> dict[str, Any]:
        """Everything that was found, for JSON and for the page."""
        size = self.crew.size if self.crew.store is not None else max(1, self.num_gpus)
        return {
            **machine.about(),
            "seconds": round(time.monotonic() - self.began_s, 1),
            "ranks": size,
            "hosts": {facts.host: facts.hardware for facts in self.crew.facts},
            "facts": [facts.as_json() for facts in self.crew.facts[:size]],
            "verdict": worst(self.findings).name,
            "findings": [finding.as_json() for finding in sorted(self.findings, key=_place)],
            "probe": None,
        }

    def _run(self, part: FirstDayPart) -> None:
        print(f"\n{part.name}: {part.words}", file=sys.stderr, flush=True)
        backend = Backend.gloo if part.where is Where.gpu else self.run.ranks.backend
        options = replace(self.run.ranks, tensor=part.num_shares, backend=backend)
        task = PartTask(
            part=part.name,
            ranks=plain(options),
            figures=str(self.out / FIGURES),
            folder=str(self.out / part.name),
            limit_s=min(part.limit_s, self.left_s),
        )
        outcome = self.crew.run(task.job(self.num_ranks(part)), lambda seconds: self._follow())
        self._follow()
        found = [finding for finding in self.findings if finding.group == part.name]
        is_ended_alone = all(rank.status in (0, -signal.SIGKILL) for rank in outcome.ranks)
        if outcome.was_killed and is_ended_alone and task.limit_s < part.limit_s:
            words = f"ended: first_day.minutes={self.run.first_day.minutes:g} was over{_last_words(outcome)}"
            self._conclude(part, Verdict.skipped, outcome, words)
        elif outcome.has_failed:
            self._conclude(part, Verdict.failed, outcome, f"{outcome.why()}{_last_words(outcome)}")
        elif worst(found) is Verdict.failed:
            first = next(finding for finding in found if finding.verdict is Verdict.failed)
            self._conclude(part, Verdict.failed, outcome, f"{first.name}: {first.words}")
        else:
            self._conclude(part, Verdict.good, outcome)

    def _follow(self) -> None:
        """Take over and print what the part at work has found since the last look."""
        with (self.out / FIGURES).open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in map(json.loads, whole.splitlines()):
            self.findings.append(finding_of(line))
            print(f"  {as_line(line)}", file=sys.stderr, flush=True)

    def _conclude(
        self, part: FirstDayPart, verdict: Verdict, outcome: JobOutcome | None = None, words: str = ""
    ) -> None:
        seconds = "" if outcome is None else f"{outcome.seconds:.0f} s"
        bound = "" if outcome is None else f"{outcome.job.limit_s:.0f} s"
        finding = Finding(
            group=PARTS_GROUP, name=part.name, verdict=verdict, measured=seconds, bound=bound, words=words
        )
        self.findings.append(finding)
        print(f"{part.name}: {verdict.name}{words and f': {words}'}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        page = self.page()
        write_whole(self.out / "first_day.json", json.dumps(page, indent=1) + "\n")
        write_whole(self.out / "first_day.txt", as_text(page, SUMMARIES))


def _place(finding: Finding) -> int:
    """Order of groups on the page: the environment and the parts, then what each part found."""
    return (environment.GROUP, PARTS_GROUP, finding.group).index(finding.group)


def _last_words(outcome: JobOutcome) -> str:
    """The last line that each rank of a job printed which had to be killed: where it hangs."""
    if not outcome.was_killed:
        return ""
    lines = [rank.output.strip().rpartition("\n")[2] for rank in outcome.ranks]
    return "".join(f"; last: {line[-LAST_CHARACTERS:]}" for line in lines if line)
