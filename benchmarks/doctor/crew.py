"""The processes that start the ranks of one job after another: one for all ranks of a host, or one per rank.

The doctor needs jobs of different sizes, and jobs that end badly. So it is never a rank itself. Without a launcher one
process starts all ranks; under torchrun or srun each process starts the rank in its place, and the one of rank 0 tells
the others through the launcher's store what to start. None of them uses Gloo or NCCL or computes on a GPU, so that the
faults that are looked for do not stop them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.doctor.facts import Facts
from benchmarks.harness.machine import ROOT, free_port
from runahead.failures import RunFailure
from runahead.ranks.meeting.rendezvous import environment_store

RANKS_WITHOUT_GPUS = 2
"""Ranks of a host that has no GPU."""

MEETING = timedelta(seconds=300)
"""Time in which all processes have to start."""

POLL_S = 0.1
SLACK_S = 30.0
"""Seconds after a job's limit in which the other processes report what became of it."""

DEATH_S = 10.0
"""Seconds in which a killed process has to end. One that waits for a driver may not."""

KEPT_CHARACTERS = 4000
"""End of a rank's output that is kept."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program on the first `num_ranks` ranks.

    Attributes:
        module, args: as for `python -m`.
        limit_s: seconds after which its ranks are killed.
        last_words_s: seconds after the first failure of a rank in which the others may end by themselves.
        port: where the ranks meet.
    """

    name: str
    module: str
    args: Sequence[str]
    num_ranks: int
    limit_s: float
    last_words_s: float
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of one rank: its exit status, when it ended (seconds since the epoch), and the end of its output.

    The status is None if the rank was killed and is there still.
    """

    rank: int
    status: int | None
    at_s: float
    output: str
    errors: str


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """End of a job; `seconds` from its start to the end of its last rank."""

    job: Job
    ranks: list[Ended]
    seconds: float
    was_killed: bool

    @property
    def has_failed(self) -> bool:
        return self.was_killed or any(rank.status != 0 for rank in self.ranks)

    def why(self) -> str:
        """One line on why it failed: what the ranks said, or that they said nothing."""
        stuck = [str(rank.rank) for rank in self.ranks if rank.status is None]
        if stuck:
            return (
                f"rank {', '.join(stuck)} did not end within {self.job.limit_s:.0f} s, was killed and is still in the "
                "driver; what follows on its GPU may fail"
            )
        killed = -signal.SIGKILL if self.was_killed else 0
        failed = [(rank, rank.status) for rank in self.ranks if rank.status and rank.status != killed]
        if self.was_killed and not failed:
            return f"it did not end within {self.job.limit_s:.0f} s and was killed"
        told = [f"rank {rank.rank} was ended by {_signal(-status)}" for rank, status in failed if status < 0]
        lines = [line for rank, _ in failed for line in rank.errors.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("[rank ")]
        told += own[:1] or ([] if told else lines[-1:])
        return "; ".join(told) or "its ranks ended without a message"


def _signal(number: int) -> str:
    """A signal's name, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class Crew:
    """This process's part in starting jobs.

    Attributes:
        size: number of ranks.
        own: ranks that this process starts.
        logs: where the output of its ranks is kept as they write it, in a folder per job; None keeps none.
        facts: of every rank, after `meet`.
    """

    size: int
    own: list[int]
    store: dist.Store | None = None
    logs: Path | None = None
    facts: list[Facts] = field(default_factory=list)
    _number: int = 0

    @classmethod
    def here(cls, num_ranks: int, *, logs: Path | None = None) -> Crew:
        """The crew of this process: of the launcher's ranks, else of `num_ranks` ranks on this host."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if "RANK" not in os.environ or size == 1:
            return cls(size=num_ranks, own=list(range(num_ranks)), logs=logs)
        rank = int(os.environ["RANK"])
        store = environment_store(rank, size, MEETING.total_seconds())
        return cls(size=size, own=[rank], store=dist.PrefixStore("runahead-doctor", store), logs=logs)

    @property
    def leads(self) -> bool:
        """Whether this process decides what is run."""
        return 0 in self.own

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager in which the leading process runs jobs. The others come to it when those are over.

        Raises:
            ValueError: as `meet`.
        """
        self.meet()
        if not self.leads:
            self.follow()
        try:
            yield
        finally:
            self.dismiss()

    def meet(self) -> None:
        """Exchange facts. Every process calls this.

        Raises:
            ValueError: a process did not start in time.
        """
        here = Facts.here()
        self._gather("here", "")
        here = here.with_load()
        self.facts = [Facts.from_json(json.loads(text)) for text in self._gather("facts", json.dumps(here.as_json()))]

    def _gather(self, name: str, text: str) -> list[str]:
        """The texts of all ranks, in order; those of a process's own ranks are the same."""
        if self.store is None:
            return [text] * self.size
        [rank] = self.own
        self.store.set(f"{name} {rank}", text)
        names = [f"{name} {each}" for each in range(self.size)]
        try:
            self.store.wait(names, MEETING)
        except RuntimeError as error:
            missing = [str(each) for each in range(self.size) if not self.store.check([names[each]])]
            raise RunFailure(f"rank {', '.join(missing)} did not start; check its host and its messages") from error
        return [self.store.get(each).decode() for each in names]

    def local_ranks(self, rank: int, num_ranks: int | None = None) -> list[int]:
        """Ranks of a job on the host of `rank`."""
        place = self.facts[rank].place
        return [each for each in range(num_ranks or self.size) if self.facts[each].place == place]

    def run(self, job: Job, tick: Callable[[float], None] = lambda seconds: None) -> JobOutcome:
        """Start a job on all hosts and wait for its end. Only the leading process calls this.

        Args:
            tick: called while it runs, with the seconds since its start.
        """
        self._number += 1
        job = Job(**asdict(job) | {"port": free_port()})
        began_s = time.time()
        if self.store is not None:
            self.store.set(f"job {self._number}", json.dumps(asdict(job)))
        ended, was_killed = self._take_part(job, tick)
        if self.store is not None:
            for rank in range(1, job.num_ranks):
                name = f"ended {self._number} {rank}"
                left_s = max(0.0, began_s + job.limit_s - time.time()) + SLACK_S
                try:
                    self.store.wait([name], timedelta(seconds=left_s))
                except RuntimeError:
                    ended.append(Ended(rank=rank, status=1, at_s=time.time(), output="", errors="its host is gone"))
                    continue
                fields = json.loads(self.store.get(name))
                was_killed = was_killed or fields.pop("was_killed")
                ended.append(Ended(**fields))
        seconds = max(rank.at_s for rank in ended) - began_s
        return JobOutcome(job=job, ranks=ended, seconds=seconds, was_killed=was_killed)

    def follow(self) -> None:
        """Start what the leading process says, until it ends. The other processes call this."""
        assert self.store is not None
        [rank] = self.own
        while True:
            self._number += 1
            name = f"job {self._number}"
            self.store.wait([name], timedelta(days=1))
            fields = json.loads(self.store.get(name))
            if fields is None:
                self.store.set(f"done {rank}", "")
                return
            job = Job(**fields)
            ended, was_killed = self._take_part(job)
            for each in ended:
                about = json.dumps(asdict(each) | {"was_killed": was_killed})
                self.store.set(f"ended {self._number} {each.rank}", about)

    def dismiss(self) -> None:
        """End the other processes."""
        if self.store is not None and self.leads:
            self.store.set(f"job {self._number + 1}", json.dumps(None))
            with suppress(RuntimeError):  # the store may end with this process, so the others must have read it
                self.store.wait([f"done {rank}" for rank in range(1, self.size)], timedelta(seconds=10))

    def _take_part(self, job: Job, tick: Callable[[float], None] = lambda seconds: None) -> tuple[list[Ended], bool]:
        """Start this process's ranks of a job and wait for them; returns also whether they had to be killed."""
        with self._folder(job) as folder:
            started = {rank: _Rank(rank, job, self, folder) for rank in self.own if rank < job.num_ranks}
            try:
                was_killed = self._wait(job, list(started.values()), tick)
            finally:
                for each in started.values():
                    each.kill()
                by_s = time.monotonic() + DEATH_S
                for each in started.values():
                    each.wait(by_s)
            return [each.ended() for each in started.values()], was_killed

    @contextmanager
    def _folder(self, job: Job) -> Iterator[Path]:
        """Folder for the output of a job's ranks."""
        if self.logs is not None:
            (folder := self.logs / job.name).mkdir(parents=True, exist_ok=True)
            yield folder
        else:
            with tempfile.TemporaryDirectory() as passing:
                yield Path(passing)

    def _wait(self, job: Job, ranks: Sequence[_Rank], tick: Callable[[float], None]) -> bool:
        began_s = time.monotonic()
        deadline_s, failed = began_s + job.limit_s, f"failed {self._number}"
        is_known = False
        while not all([rank.has_ended() for rank in ranks]):
            now_s = time.monotonic()
            if now_s > deadline_s:
                return True
            if not is_known:
                has_failed = any(rank.status for rank in ranks)
                if has_failed and self.store is not None:
                    self.store.set(failed, "")
                is_known = has_failed or (self.store is not None and self.store.check([failed]))
                deadline_s = min(deadline_s, now_s + job.last_words_s) if is_known else deadline_s
            tick(now_s - began_s)
            time.sleep(POLL_S)
        if any(rank.status for rank in ranks) and self.store is not None:
            self.store.set(failed, "")
        return False


class _Rank:
    """A rank of a job as a child process, with its output in files of `folder`."""

    def __init__(self, rank: int, job: Job, crew: Crew, folder: Path) -> None:
        self._rank = rank
        self._at_s: float | None = None
        local = crew.local_ranks(rank, job.num_ranks)
        leaves_out = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "GROUP_RANK")
        environment = {name: value for name, value in os.environ.items() if name not in leaves_out}
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": str(job.port),
            # With it a rank ends when this process ends (launch/program/launcher.py).
            "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID", "doctor"),
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
        }
        self._paths = [folder / f"{rank}.out", folder / f"{rank}.err"]
        with self._paths[0].open("wb") as output, self._paths[1].open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", job.module, *job.args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
            )

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def has_ended(self) -> bool:
        if self._at_s is None and self.status is not None:
            self._at_s = time.time()
        return self._at_s is not None

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.status is None:
            self._process.kill()

    def wait(self, by_s: float) -> None:
        """Wait for its end, until `by_s` of the monotonic clock."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, by_s - time.monotonic()))
        self.has_ended()

    def ended(self) -> Ended:
        """How it ended, or without a status that it has not."""
        output, errors = (path.read_text(encoding="utf-8", errors="replace") for path in self._paths)
        return Ended(
            rank=self._rank,
            status=self.status,
            at_s=time.time() if self._at_s is None else self._at_s,
            output=output[-KEPT_CHARACTERS:],
            errors=errors[-KEPT_CHARACTERS:],
        )


def overrides(section: str, options: Any) -> list[str]:
    """Options of a dataclass as name=value, for another program's command line."""
    texts = []
    for name, value in _plain(vars(options)).items():
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            texts.append(f"{section}={shown}" if name == "name" else f"{section}.{name}={shown}")
    return texts


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "name", value) for name, value in fields.items()}
