"""An examination from its options to its page: what launch/doctor.py does."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.doctor import environment
from benchmarks.doctor.checks import (
    check_chosen_blocks,
    check_decoding,
    check_devices,
    check_exactness,
    check_fault,
    check_links,
)
from benchmarks.doctor.crew import RANKS_WITHOUT_GPUS, Crew, Job, JobOutcome, overrides
from benchmarks.doctor.findings import Finding, Verdict, worst
from benchmarks.doctor.options import AUTO, LARGE_MIB, SHAPES, DoctorRun
from benchmarks.doctor.page import as_text
from benchmarks.doctor.picture import picture
from benchmarks.doctor.speed import LINES_OF, Race, check_race, check_tokens, races
from benchmarks.doctor.tasks import DRILLS, JobTask, plain
from benchmarks.harness import lines, machine
from benchmarks.harness.machine import ROOT
from launch.program.progress import Bar
from runahead.config import Device, ModelOptions, RanksOptions
from runahead.files import ensure_writable, write_whole
from runahead.ranks.devices import default_threads

LENGTHS = {True: [4096, 16384, 65536], False: [512, 1024, 2048]}
"""Default prompt lengths in tokens, with GPUs and without."""

START_S = 20.0
"""Seconds that the ranks of a job take to start and to load a model, roughly."""

PROBE_S = 60.0
"""Seconds that the probe has at least, however small the budget."""

NEEDED_S = 15.0
"""Seconds of the budget that must be left for another job."""


def examine(run: DoctorRun) -> int:
    """Examine this machine, or the launcher's machines, and write the page.

    Returns:
        the exit status: 0, or 1 if a check failed.

    Raises:
        ValueError: the folder for the page cannot be written, or a process did not start.
    """
    began_s = time.monotonic()
    uses_gpus = run.ranks.device is not Device.cpu and torch.cuda.device_count() > 0
    ranks_here = run.doctor.ranks or (torch.cuda.device_count() if uses_gpus else RANKS_WITHOUT_GPUS)
    crew = Crew.here(ranks_here)
    if crew.leads:
        out = Path(run.doctor.out)
        out.mkdir(parents=True, exist_ok=True)
        ensure_writable(out / "doctor.json", option="doctor.out")
    with crew.together(), tempfile.TemporaryDirectory() as folder, Bar("examining", shown=crew.leads) as bar:
        if not crew.leads:
            return 0
        examination = Examination(run, crew, uses_gpus, Path(folder), bar, deadline_s=began_s + run.doctor.minutes * 60)
        examination.run_all()
    page = examination.page(time.monotonic() - began_s)
    text = as_text(page)
    write_whole(out / "doctor.json", json.dumps(page, indent=1) + "\n")
    write_whole(out / "doctor.txt", text)
    write_whole(out / "doctor.png", picture(page))
    print(text, end="", flush=True)
    print(f"\nwritten to {out / 'doctor.txt'}, doctor.json and doctor.png", file=sys.stderr)
    return int(worst(examination.findings) is Verdict.failed)


@dataclass
class Examination:
    """The checks in order, on the leading process.

    Attributes:
        deadline_s: when the time budget ends, on the monotonic clock.
        findings: of all checks so far.
        probe: what the probe measured; None before it.
        races: what the benchmarks measured.
    """

    run: DoctorRun
    crew: Crew
    uses_gpus: bool
    folder: Path
    bar: Bar
    deadline_s: float
    findings: list[Finding] = field(default_factory=list)
    probe: dict[str, Any] | None = None
    races: list[Race] = field(default_factory=list)

    def run_all(self) -> None:
        """Check the environment, then run the jobs, unless something is wrong that would make them fail."""
        facts = self.crew.facts
        local = [len(self.crew.local_ranks(rank)) for rank in range(self.crew.size)]
        examined = environment.Examined(facts=facts, local_ranks=local, uses_gpus=self.uses_gpus)
        self.findings += environment.check_environment(examined)
        if worst(self.findings) is Verdict.failed:
            words = "not run, since the environment has to be mended first"
            self.findings.append(Finding(group="jobs", name="all others", verdict=Verdict.skipped, words=words))
            return
        counts = self._counts()
        self._steps = 1 + len(DRILLS) * (self.crew.size > 1 and self.run.doctor.faults) + len(counts)
        self._probe()
        if self.probe is None:
            return
        if self.crew.size > 1 and self.run.doctor.faults:
            for what in DRILLS:
                self._drill(what)
        for number in counts:
            self._race(number)

    def page(self, seconds: float) -> dict[str, Any]:
        """Everything that was found, for JSON; `seconds` is how long it took."""
        return {
            **machine.about(),
            "seconds": round(seconds, 1),
            "ranks": self.crew.size,
            "hosts": {facts.host: facts.hardware for facts in self.crew.facts},
            "facts": [facts.as_json() for facts in self.crew.facts],
            "verdict": worst(self.findings).name,
            "findings": [finding.as_json() for finding in self.findings],
            "probe": self.probe,
            "races": [race.as_json() for race in self.races],
        }

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.deadline_s - time.monotonic()

    @property
    def lengths(self) -> list[int]:
        return self.run.doctor.lengths or LENGTHS[self.uses_gpus]

    @property
    def model(self) -> ModelOptions:
        """The model that is run: that of the options, or a shape that fits the GPUs."""
        if self.run.model.config != AUTO:
            return self.run.model
        gpus = [gpu["total_mib"] for facts in self.crew.facts for gpu in facts.gpus]
        is_large = self.uses_gpus and bool(gpus) and min(gpus) >= LARGE_MIB
        return replace(self.run.model, config=str(ROOT / "benchmarks" / "models" / SHAPES[is_large]))

    def ranks_options(self, timeout_s: float | None = None) -> RanksOptions:
        """Options of the ranks of all jobs, whose threads are those of the largest."""
        threads = self.run.ranks.threads or default_threads(len(self.crew.local_ranks(0)))
        return replace(self.run.ranks, threads=threads, timeout_s=timeout_s or self.run.ranks.timeout_s)

    def _counts(self) -> list[int]:
        """Numbers of ranks whose speed is measured, the largest first: powers of two, and all."""
        size = self.crew.size
        powers = [2**exponent for exponent in range(1, size.bit_length()) if 2**exponent < size]
        return [size, *reversed(powers)]

    def _run(self, job: Job) -> JobOutcome:
        """Run a job, with its name and its seconds beside the progress bar."""
        shown = -1

        def tick(seconds: float) -> None:
            nonlocal shown
            if int(seconds) > shown and sys.stderr.isatty():
                shown = int(seconds)
                self.bar.say(f"{job.name}, {shown} s")

        outcome = self.crew.run(job, tick)
        self.bar.step_of(self._steps, job.name)
        return outcome

    def _probe(self) -> None:
        out = self.folder / "probe.json"
        ranks = self.ranks_options()
        task = JobTask(kind="probe", model=plain(self.model), ranks=plain(ranks), length=self.lengths[0], out=str(out))
        limit_s = max(PROBE_S, self.left_s)
        outcome = self._run(task.job("probe", self.crew.size, limit_s=limit_s, timeout_s=ranks.timeout_s))
        if outcome.has_failed and not out.exists():
            words = f"{outcome.why()}. Nothing else can be measured before this job ends well"
            self.findings.append(Finding(group="jobs", name="probe", verdict=Verdict.failed, words=words))
            return
        if outcome.has_failed:  # in its last check
            words = f"{outcome.why()}, while it was asked what reads chosen blocks; what was measured before is shown"
            self.findings.append(Finding(group="devices", name="sparse prefill", verdict=Verdict.failed, words=words))
        self.probe = json.loads(out.read_text(encoding="utf-8"))
        self.findings += check_links(self.probe, self.crew.facts)
        self.findings += [*check_devices(self.probe), *check_chosen_blocks(self.probe)]
        self.findings += check_exactness(self.probe, self.crew.size)
        self.findings += check_decoding(self.probe)

    def _drill(self, what: str) -> None:
        timeout_s, name = self.run.doctor.timeout_s, f"a rank {what}"
        if self.left_s < NEEDED_S:
            self._leave_out("faults", name)
            return
        out = self.folder / what / "drill.json"
        out.parent.mkdir()
        task = JobTask(
            kind="drill",
            model=plain(self.model),
            ranks=plain(self.ranks_options(timeout_s)),
            length=self.lengths[0],
            out=str(out),
            signal=DRILLS[what],
        )
        outcome = self._run(task.job(name, self.crew.size, limit_s=self.left_s, timeout_s=timeout_s))
        reports = list(out.parent.glob("*.fault.json"))
        for report in reports:
            with suppress(OSError):
                shutil.copyfile(report, Path(self.run.doctor.out) / f"{what}.{report.name}")
        self.findings.append(check_fault(what, outcome, timeout_s, len(reports)))

    def _race(self, number: int) -> None:
        assert self.probe is not None
        variants = [name for name in LINES_OF[number > 1] if name != "tensor" or number in self.probe["shares"]]
        fitting = [
            length
            for n, length in enumerate(self.lengths)
            if estimate_s(self.probe, self.lengths[: n + 1], number, len(variants), self.run.doctor.rounds)
            < self.left_s
        ]
        for length in self.lengths:
            if length not in fitting:
                self._leave_out("speed", f"{length:,} tokens on {number} rank{'s' * (number > 1)}")
        if not fitting:
            return
        out = self.folder / f"bench{number}.jsonl"
        args = [
            *overrides("model", self.model),
            *overrides("ranks", self.ranks_options()),
            f"bench.variants=[{','.join(variants)}]",
            f"bench.lengths={fitting}".replace(" ", ""),
            f"bench.pairs={self.run.doctor.rounds}",
            "bench.probe_repeats=1",
            "bench.strict=false",
            f"bench.results={out}",
        ]
        job = Job(
            name=f"{number} rank{'s' * (number > 1)}",
            module="launch.bench",
            args=args,
            num_ranks=number,
            limit_s=max(NEEDED_S, self.left_s),
            last_words_s=self.ranks_options().timeout_s + 15,
        )
        outcome = self._run(job)
        found = races(lines.read(out)) if out.exists() else []
        if outcome.has_failed:
            name, words = job.name, f"{outcome.why()}; what was measured before that is shown"
            verdict = Verdict.skipped if outcome.was_killed else Verdict.failed
            self.findings.append(Finding(group="speed", name=name, verdict=verdict, words=words))
        self.races += found
        for race in found:
            self.findings += [*check_race(race, self.probe), *check_tokens(race)]

    def _leave_out(self, group: str, name: str) -> None:
        words = f"would not end within doctor.minutes={self.run.doctor.minutes:g}; give it more, or shorter lengths"
        self.findings.append(Finding(group=group, name=name, verdict=Verdict.skipped, words=words))


def estimate_s(probe: dict[str, Any], lengths: Sequence[int], num_ranks: int, num_variants: int, rounds: int) -> float:
    """Seconds of a benchmark, roughly, from one rank's TTFT at the shortest length."""
    weight = [length * (1 + length / 8192) for length in (*lengths, probe["length"])]
    single = [probe["runs"]["single"]["ttft_s"] * each / weight[-1] for each in weight[:-1]]
    each_round = sum(single) * (1 + 1.3 * (num_variants - 1) / num_ranks)
    return START_S + (1 + rounds) * each_round + max(single)
