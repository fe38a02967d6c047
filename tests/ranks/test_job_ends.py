"""A whole job, as launch/infer.py runs it, ends when one of its processes does: soon, with one line from each."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.families import save_tiny_config
from tests.tokenizers_for_tests import byte_level
from tests.warm_program import WarmJob

INFER = Path(__file__).resolve().parents[2] / "launch" / "infer.py"
TIMEOUT_S = 3.0
"""Timeout in the test that stops a rank. The other tests have a longer one, for busy machines."""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with a tokenizer, so that the answer streams while the job runs."""
    return save_tiny_config(tmp_path_factory.mktemp("model"), byte_level(), max_position_embeddings=200_000)


class Job(WarmJob):
    """launch/infer.py on a prompt of 64 random tokens.

    Args:
        of_last: more options of the last rank.
    """

    def __init__(
        self, config: Path, *options: str, size: int = 2, timeout_s: float = 60.0, of_last: Sequence[str] = ()
    ) -> None:
        args = ["model=random", f"model.config={config}", "partition=even"]
        args += ["prompt.random_tokens=64", f"ranks.timeout_s={timeout_s}", "generation.ignore_eos=true", *options]
        super().__init__(INFER, [*[args] * (size - 1), [*args, *of_last]])

    def wait_for_answer(self) -> None:
        """Return once the answer streams: the ranks are in the middle of decoding."""
        first = self.ranks[0]
        while not first.output:
            assert first.status is None, first.errors
            time.sleep(0.02)

    def end(self, rank: int) -> tuple[int | None, str]:
        """(exit status, standard error) of a rank."""
        status = self.ranks[rank].wait(60)
        return status, self.ranks[rank].errors


# Decoding tens of thousands of tokens takes minutes, so the job is in the middle of it after a few seconds.
LONG = "generation.max_new_tokens=100000"


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_others_with_one_line(tiny_model: Path, victim: int) -> None:
    job = Job(tiny_model, LONG)
    try:
        job.wait_for_answer()
        os.kill(job.ranks[victim].pid, signal.SIGKILL)
        status, errors = job.end(1 - victim)
        assert status == 1
        assert len(errors.splitlines()) == 1, errors
        assert errors.startswith(f"[rank {1 - victim}/2]")
    finally:
        job.kill()


def test_stopped_rank_is_named_after_its_silence(tiny_model: Path, tmp_path: Path) -> None:
    job = Job(tiny_model, LONG, f"ranks.fault_report={tmp_path}/faults.json", timeout_s=TIMEOUT_S)
    try:
        job.wait_for_answer()
        os.kill(job.ranks[1].pid, signal.SIGSTOP)
        status, errors = job.end(0)
        assert status == 1
        silence = re.search(r"rank 1 has been silent for (\d+) s", errors)
        assert silence is not None and int(silence[1]) >= TIMEOUT_S
        assert "the next token of rank 1" in errors
        assert len(errors.splitlines()) == 1, errors
        # It would have stayed for ever: no signal but this one ends a process that is stopped.
        assert job.ranks[1].wait(60) == -signal.SIGKILL
        fault = json.loads((tmp_path / "faults.rank0.fault.json").read_text())
        assert errors.strip() == f"[rank 0/2] {fault['reason']}; see faults.rank0.fault.json"
        assert fault["waiting_for"]["what"] == "the next token of rank 1"
        assert [each["pid"] for each in fault["ranks"]] == [process.pid for process in job.ranks]
        assert fault["outstanding"] == []
        # Half of the prompt's 64 tokens, in every layer, to the one other rank; 2 KV heads of 8 keys and values.
        assert {(each["layer"], each["start"], each["end"], each["bytes"]) for each in fault["done"]} == {
            (layer, 0, 32, 32 * 2 * 2 * 8 * 4) for layer in range(4)
        }
        assert {(each["direction"], each["peer"]) for each in fault["done"]} == {("send", 1)}
        assert "MainThread" in fault["threads"]
    finally:
        job.kill()


def test_report_of_failed_job_is_not_half_written(tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    report.write_text('{"kept": true}')
    job = Job(tiny_model, LONG, f"report={report}")
    try:
        job.wait_for_answer()
        os.kill(job.ranks[1].pid, signal.SIGKILL)
        status, _ = job.end(0)
        assert status == 1
        assert json.loads(report.read_text()) == {"kept": True}
        assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.rank0.fault.json"}
    finally:
        job.kill()


def test_ranks_that_were_started_differently_refuse_with_one_line(tiny_model: Path) -> None:
    job = Job(tiny_model, of_last=["generation.max_new_tokens=7", "partition=ratios", "partition.ratios=[0.6,0.4]"])
    try:
        ends = [job.end(rank) for rank in range(2)]
        assert [status for status, _ in ends] == [2, 2]
        assert ends[0][1] == (
            "[rank 0/2] rank 1 and rank 0 differ in partition.name (even on rank 0, ratios on rank 1), "
            "partition.ratios (None on rank 0, [0.6, 0.4] on rank 1) and "
            "generation.max_new_tokens (64 on rank 0, 7 on rank 1); start every rank with the same command line\n"
        )
        assert ends[1][1] == ""
    finally:
        job.kill()
