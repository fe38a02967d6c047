"""`--multirun`: one job after another, for every combination of the values that options list."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from launch.program.arguments import VERBATIM
from launch.program.compose import ROOT, CommandLine, Program
from launch.program.ending import refuse, say
from launch.program.launcher import end_with_parent
from launch.program.signals import ending_signals
from launch.program.text_table import text_table
from launch.program.written_files import SHARED, WRITTEN
from runahead.files import write_whole

OF_THE_SWEEP = ("sweep.ranks", "sweep.dir")
"""Options of the sweep itself, which its jobs do not get."""

MOST_JOBS = 10_000

END_S = 60.0
"""Seconds in which a job may end after SIGTERM. torchrun gives its ranks 30 s."""


@dataclass(kw_only=True)
class SweepJob:
    """One combination of values.

    Attributes:
        overrides: by option, its override; of free texts, all of them. The last one is sweep.ranks.
        folder: where its files go.
        problem: what is wrong with its options; such a job is not started.
        status: how it ended, for the table.
        seconds: how long it ran.
        written: by option, the file or folder that it writes. A relative name is in the folder of the job.
        figures: figures from its report, by their names there.
    """

    overrides: dict[str, str]
    folder: Path
    problem: str = ""
    status: str = "not started"
    seconds: float | None = None
    written: dict[str, Path] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """The overrides that the program gets."""
        return [text for name, text in self.overrides.items() if name != "sweep.ranks"]

    @property
    def report(self) -> Path | None:
        """The JSON that it writes, if its program writes one."""
        return self.written.get("report")

    @property
    def outputs(self) -> list[str]:
        """Overrides that name the files in its folder."""
        return [f"{name}={path}" for name, path in self.written.items() if path.is_relative_to(self.folder)]

    def value(self, name: str) -> str:
        return self.overrides[name].partition("=")[2]

    def changed(self, swept: Sequence[str]) -> str:
        """The overrides in which this job differs from others."""
        return " ".join(f"{name}={self.value(name)}" for name in swept)

    def command(self, module: str, flags: Mapping[str, str]) -> list[str]:
        """The command that starts the ranks of this job."""
        given = [part for flag, value in flags.items() if flag != "--multirun" for part in (flag, value) if part]
        return [*_launcher(int(self.value("sweep.ranks"))), module, *given, *self.options, *self.outputs]


def _launcher(num_ranks: int) -> list[str]:
    """Command to start the ranks of a job: torchrun on this host, or srun where a sweep has several nodes of SLURM."""
    module = [sys.executable, "-m"]
    if num_ranks == 1:
        return module
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if num_nodes == "1":
        return [*module, "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    # overlap: the sweep may be a step itself. gpu-bind: a rank takes the GPU of its number. wait: for what others say.
    how = ["--overlap", "--gpu-bind=none", "--wait=15", f"--nodes={min(num_ranks, int(num_nodes))}"]
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # which srun does not take over by itself
        how.append(f"--cpus-per-task={cpus}")
    return ["srun", f"--ntasks={num_ranks}", *how, *module]


def run_sweep(program: Program[Any], command: CommandLine[Any]) -> int:
    """Run the jobs of a sweep one after another, and print and write the table of their results.

    A job that fails does not stop the others.

    Returns: the exit status. 0: all jobs are done; 1: a job failed; 2: no job can be started as the command line is.
    """
    try:
        folder, jobs = _plan(program, command)
    except ValueError as error:
        return refuse(error)
    swept = [name for name in jobs[0].overrides if len({job.overrides[name] for job in jobs}) > 1]
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{len(jobs)} jobs in {folder}")
    try:
        with ending_signals(lambda error: None):  # a job that is being ended may take longer than this process would
            for job in jobs:
                _run(job, program, command, swept, len(jobs))
    finally:
        table = _table(jobs, swept)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table)
        write_whole(folder / "table.csv", text.getvalue())
        print(text_table(table, left=(0, len(table[0]) - 1)), end="", flush=True)
    if not any(job.figures for job in jobs):
        _print_outputs(jobs, swept)
    failed = sum(job.status != "done" for job in jobs)
    say(f"{f'{failed} of {len(jobs)} jobs failed; ' if failed else ''}the table is in {folder / 'table.csv'}")
    return 1 if failed else 0


def _plan(program: Program[Any], command: CommandLine[Any]) -> tuple[Path, list[SweepJob]]:
    """The folder of the sweep and its jobs.

    Raises:
        ValueError: for mistakes that concern the sweep or all of its jobs.
    """
    if "RANK" in os.environ:
        raise ValueError(
            "--multirun starts the ranks of each job by itself; run it without torchrun or srun: "
            f"python -m {program.module} --multirun sweep.ranks={os.environ.get('WORLD_SIZE', '1')} ..."
        )
    folder, jobs = _jobs(program, command)
    for job in jobs:
        _prepare(job, program, command)
    if all(job.problem for job in jobs):
        raise ValueError(jobs[0].problem)
    for name in WRITTEN:
        paths = Counter(Path(os.path.normpath(job.written[name])) for job in jobs if name in job.written)
        twice = [path for path, count in paths.items() if count > 1 and not _is_device(path)]
        if twice and name not in SHARED:
            raise ValueError(
                f"{name}={twice[0]} would be written by every job; give a relative name, which is in each job's "
                "folder, or leave it out"
            )
    return folder, jobs


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _jobs(program: Program[Any], command: CommandLine[Any]) -> tuple[Path, list[SweepJob]]:
    """The folder of the sweep and its jobs, the last option changing fastest, as in Hydra's own sweeper."""
    values: dict[str, list[str]] = {}
    with program.config_loader(command.flags) as loader:
        for text in command.overrides:
            name = text.partition("=")[0].lstrip("+")
            if "sweep" in name.split(".") and name not in OF_THE_SWEEP:
                raise ValueError(f"unknown option {name}; a sweep has the options {' and '.join(OF_THE_SWEEP)}")
            values[text if name in VERBATIM else name] = _values(text, name, loader)
    given = values.pop("sweep.dir", [time.strftime("sweep.dir=multirun/%Y-%m-%d/%H-%M-%S")])[-1]
    folder = Path(given.partition("=")[2])
    if given == "sweep.dir=":
        raise ValueError("sweep.dir= is empty; name a new folder, or leave it out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{given} is there already; name a new folder, or leave it out")
    ranks = values.pop("sweep.ranks", ["sweep.ranks=1"])
    values["sweep.ranks"] = [f"sweep.ranks={_num_ranks(text.partition('=')[2])}" for text in ranks]
    chosen = list(itertools.islice(itertools.product(*values.values()), MOST_JOBS + 1))
    if len(chosen) > MOST_JOBS:
        raise ValueError(f"--multirun has more than {MOST_JOBS:,} jobs; give fewer values at once")
    folder = folder.resolve()
    return folder, [
        SweepJob(overrides=dict(zip(values, texts, strict=True)), folder=folder / str(number))
        for number, texts in enumerate(chosen)
    ]


def _values(text: str, name: str, loader: ConfigLoaderImpl) -> list[str]:
    """An override for each value of `text`, in Hydra's grammar: a,b  choice(a,b)  range(1,4)  glob(*) and so on."""
    if name in VERBATIM or name == "sweep.dir":
        return [text]
    if name == "prompt.file" and text.partition("=")[2] == "-":
        raise ValueError("prompt.file=- can be read by one job only; give a file with --multirun")
    try:
        [override] = OverridesParser.create(config_loader=loader).parse_overrides([text])
    except (HydraException, RecursionError, ValueError):
        return [text]  # a file name, or a mistake of which composing the job says more
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise ValueError(f"{text} has no list of values; use a,b or choice(a,b) or range(start,stop,step)")
    found = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not found:
        raise ValueError(f"{text} has no value; check the pattern")
    return found


def _num_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"sweep.ranks={text} is not a number of ranks; give 1 or more")
    return int(text)


def _prepare(job: SweepJob, program: Program[Any], command: CommandLine[Any]) -> None:
    """Compose the options of a job, to find mistakes before any rank works, and name the files that it writes."""
    try:
        run = program.compose(job.options, command.flags)
    except ValueError as error:
        job.problem = str(error)
        return
    for name in WRITTEN:
        value: Any = run
        for part in name.split("."):
            value = getattr(value, part, None)
        if name == "report" and hasattr(run, "report"):
            value = value or "report.json"
        if isinstance(value, str):
            job.written[name] = job.folder / value


def _run(job: SweepJob, program: Program[Any], command: CommandLine[Any], swept: Sequence[str], num_jobs: int) -> None:
    """Run a job to its end, its answers and its log in files. Whatever ends this call, no process of it is left."""
    title = f"job {job.folder.name} of {num_jobs}: {job.changed(swept)}".rstrip(": ")
    began_s = time.perf_counter()
    job.folder.mkdir()
    for path in job.written.values():
        if path.is_relative_to(job.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
    overrides = list(job.overrides.values())
    write_whole(job.folder / "overrides.yaml", yaml.safe_dump(overrides, allow_unicode=True))
    if job.problem:
        job.status = f"failed: {job.problem}"
        say(f"{title}: {job.status}")
        return
    say(title)
    job.status = "interrupted"
    with (job.folder / "output.txt").open("wb") as output, (job.folder / "log.txt").open("wb") as log:
        status = _wait_for(job.command(program.module, command.flags), output, log)
    job.seconds = time.perf_counter() - began_s
    job.status = "done" if status == 0 else f"failed: {_reason(job.folder / 'log.txt', status)}"
    if status == 0 and job.report is not None:
        job.figures = _figures(json.loads(job.report.read_text(encoding="utf-8")))
    figures = "".join(f", {name} {value}" for name, value in job.figures.items())
    say(f"job {job.folder.name}: {job.status} ({job.seconds:.1f} s{figures})")


def _wait_for(command: Sequence[str], output: IO[bytes], log: IO[bytes]) -> int:
    """The exit status of a command, which runs in a session of its own: Ctrl-C reaches this process alone."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=log,
        # Our packages rather than folders of the same name in the current folder.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks of a torchrun end with it
            process.wait()


def _reason(log: Path, status: int) -> str:
    """The line of a job's log that says why it failed: the first that a rank wrote, else the last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line for line in lines if line.startswith("[rank ")] or [line for line in lines if line][-1:]
    return told[0] if told else f"exit status {status}"


def _figures(report: dict[str, Any]) -> dict[str, str]:
    """Figures of a report, by their names there: of several batches, medians of times and the largest peak."""
    prompts = report.get("prompts") or [report]
    batches = list({prompt.get("batch", 0): prompt for prompt in prompts}.values())
    figures: dict[str, str] = {}
    for name in ("ttft_s", "tpot_s"):
        times = [batch[name] for batch in batches if batch.get(name) is not None]
        if times:
            figures[name] = f"{statistics.median(times):.4g}"
    peaks = [rank["kv_peak_bytes"] for batch in batches for rank in batch.get("ranks", ())]
    return figures | ({"kv_peak_bytes": str(max(peaks))} if peaks else {})


def _table(jobs: Sequence[SweepJob], swept: Sequence[str]) -> list[list[str]]:
    """A row per job under a row of headings."""
    names = list(dict.fromkeys(name for job in jobs for name in job.figures))
    rows = [["job", *swept, "seconds", *names, "status"]]
    for job in jobs:
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        values = (job.figures.get(name, "") for name in names)
        rows.append([job.folder.name, *map(job.value, swept), seconds, *values, job.status])
    return rows


def _print_outputs(jobs: Sequence[SweepJob], swept: Sequence[str]) -> None:
    """Print what the jobs of a program without such figures printed."""
    for job in jobs:
        path = job.folder / "output.txt"
        if path.is_file() and (text := path.read_text(encoding="utf-8", errors="replace")):
            print(f"\njob {job.folder.name}: {job.changed(swept)}\n{text}", end="", flush=True)
