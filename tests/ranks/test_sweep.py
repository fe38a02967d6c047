"""A sweep really starts ranks, job after job, and ends them with itself."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.families import save_tiny_config

ROOT = Path(__file__).resolve().parents[2]

MINE = """
defaults: [infer, _self_]
model: {name: random, config: model}
prompt: {random_tokens: 40}
generation: {max_new_tokens: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to start sweeps in, with a tiny model and a primary config that names it."""
    save_tiny_config(tmp_path / "model", num_hidden_layers=2)
    (tmp_path / "mine.yaml").write_text(MINE, encoding="utf-8")
    (tmp_path / "launch.py").write_text("raise SystemExit('a file of the user')", encoding="utf-8")
    return tmp_path


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch" / "infer.py"), "--config-dir", ".", "--config-name", "mine"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [*command, "--multirun", "sweep.dir=s", *args],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "s" / "table.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def processes_of(folder: Path) -> list[psutil.Process]:
    """The sweep's, torchrun's and the ranks' own, by the folder that they work in."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(is_so, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := is_so()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


@pytest.mark.slow
def test_jobs_run_on_their_ranks_and_a_failing_one_is_told(folder):
    sweep = start(folder, "sweep.ranks=2", "model.config=nothing,model")
    out, err = sweep.communicate(timeout=240)
    failed, done = table(folder)
    assert sweep.returncode == 1, err
    assert failed["status"].startswith("failed: [rank 0/2] model.config=nothing")
    report = json.loads((folder / "s" / "1" / "report.json").read_text())
    assert report["world_size"] == 2
    assert (done["status"], done["ttft_s"]) == ("done", f"{report['ttft_s']:.4g}")
    assert "TTFT" in (folder / "s" / "1" / "log.txt").read_text()
    assert len(out.splitlines()) == 3
    assert "job 1: done (" in err and "1 of 2 jobs failed; the table is in " in err
    assert processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "ranks"),
    [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1), (signal.SIGKILL, -signal.SIGKILL, 2)],
)
def test_a_sweep_that_is_ended_leaves_no_process(folder, number, status, ranks):
    sweep = start(folder, f"sweep.ranks={ranks}", "warmup=1000000,2")
    # The sweep, torchrun if there is one, and the ranks.
    try:
        assert wait_until(lambda: len(processes_of(folder)) >= (2 if ranks == 1 else 2 + ranks), 120)
        time.sleep(3)
        sweep.send_signal(number)
        _, err = sweep.communicate(timeout=120)
    finally:
        sweep.kill()  # otherwise it would go on after a failed test
    assert sweep.returncode == status
    assert wait_until(lambda: processes_of(folder) == [], 60)
    if number != signal.SIGKILL:
        assert [row["status"] for row in table(folder)] == ["interrupted", "not started"]
        assert err.splitlines()[-1] == ("interrupted" if number == signal.SIGINT else "ended by SIGTERM")
