"""Jobs that the doctor starts: their ends, their messages, and crews of several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest
import torch.distributed as dist

from benchmarks.doctor import crew as crews_of_jobs
from benchmarks.doctor.crew import Crew, Job
from benchmarks.doctor.facts import Facts

PLACE = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"


def job(code: str, *, limit_s: float = 60, last_words_s: float = 60, num_ranks: int = 2) -> Job:
    """Runs `code` once on every rank."""
    args = ["-n", "1", "-r", "1", code]
    return Job(name="", module="timeit", args=args, num_ranks=num_ranks, limit_s=limit_s, last_words_s=last_words_s)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.here()


@pytest.fixture
def crew(facts: Facts) -> Crew:
    return Crew(size=2, own=[0, 1], facts=[facts, facts])


def test_ranks_have_their_places(crew: Crew) -> None:
    outcome = crew.run(job(PLACE))
    assert not outcome.has_failed
    assert [rank.output.splitlines()[0] for rank in outcome.ranks] == ["0 2 0 2", "1 2 1 2"]


def test_a_smaller_job_has_fewer_ranks(crew: Crew) -> None:
    [alone] = crew.run(job(PLACE, num_ranks=1)).ranks
    assert alone.output.startswith("0 1 0 1\n")


def test_a_rank_that_fails_says_why_and_the_others_have_last_words(crew: Crew) -> None:
    code = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('[rank 1/2] no memory'); time.sleep(50)"
    outcome = crew.run(job(code, last_words_s=0.5))
    assert outcome.was_killed  # and has not slept to its end, which comes before the job's own limit
    assert [rank.status for rank in outcome.ranks] == [-9, 1]
    assert outcome.why().endswith("[rank 1/2] no memory")


def test_a_job_that_hangs_is_killed_at_its_limit(crew: Crew) -> None:
    outcome = crew.run(job("import time; time.sleep(50)", limit_s=1))
    assert outcome.has_failed and outcome.was_killed
    assert {rank.status for rank in outcome.ranks} == {-9}
    assert outcome.why() == "it did not end within 1 s and was killed"


def test_a_rank_that_a_signal_ends_is_told_with_its_name(crew: Crew) -> None:
    code = "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGSEGV)"
    assert crew.run(job(code)).why() == "rank 1 was ended by SIGSEGV"


def test_a_rank_that_cannot_be_killed_does_not_stop_the_day(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits in a driver's call outlives its kill."""
    left: list[int] = []
    monkeypatch.setattr(crews_of_jobs, "DEATH_S", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left.append(process.pid))
    outcome = crew.run(job("import time; time.sleep(50)", limit_s=1, num_ranks=1))
    os.kill(left[0], signal.SIGKILL)
    assert outcome.has_failed and [rank.status for rank in outcome.ranks] == [None]
    assert outcome.why().startswith("rank 0 did not end within 1 s, was killed and is still in the driver")


def test_processes_of_a_launcher_follow_the_first(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "here", lambda: facts)
    monkeypatch.setattr(Facts, "with_load", lambda self: self)
    store = dist.HashStore()
    crews = [Crew(size=2, own=[rank], store=store) for rank in range(2)]
    assert [crew.leads for crew in crews] == [True, False]

    def follow() -> None:
        crews[1].meet()
        crews[1].follow()

    follower = threading.Thread(target=follow)
    follower.start()
    crews[0].meet()
    assert crews[0].facts == [facts, facts] and crews[0].local_ranks(1) == [0, 1]
    outcomes = [crews[0].run(job(PLACE)), crews[0].run(job("raise ValueError('no')", num_ranks=2))]
    crews[0].dismiss()
    follower.join(timeout=30)
    assert not follower.is_alive()
    assert [rank.output.splitlines()[0] for rank in outcomes[0].ranks] == ["0 2 0 2", "1 2 1 2"]
    assert outcomes[1].has_failed and outcomes[1].why() == "ValueError: no"
