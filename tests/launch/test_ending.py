"""The end of a program: its status, what torchrun is told, and a rank that leaves without Python being taken down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch import bench, doctor, evaluate, exact_layers, first_day, infer, serve
from launch.program.ending import end_with, open_closed_streams
from launch.program.signals import Terminated
from partitioner import plan, search, show
from policies import duo_gates, fit_kvzap, retrieval_heads, skew
from policies.prompt_cache import encode
from runahead.failures import PeerFailure, RunFailure, SharedError
from tests.exit_status import exit_status, one_line_error

ROOT = Path(__file__).resolve().parents[2]

# `Kept` is deleted when Python is taken down. What is printed stays in a buffer until something flushes it.
LEAVING = """
import atexit, sys
from launch.program.ending import leave
class Kept:
    def __del__(self):
        print("taken down")
kept = Kept()
atexit.register(print, "registered")
print("answer")
leave(3)
"""


def left(reader: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    left_out = ("WORLD_SIZE", "PYTHONUNBUFFERED")
    plain = {name: value for name, value in os.environ.items() if name not in left_out} | environment
    return subprocess.run(
        [sys.executable, "-c", LEAVING], cwd=ROOT, env=plain, stdout=reader, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, ["answer", "registered"]),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ["answer", "registered", "taken down"]),
        ({}, ["answer", "registered", "taken down"]),
    ],
    ids=["a rank of two", "the only rank", "no rank"],
)
def test_a_rank_leaves_without_taking_python_down(environment: dict[str, str], said: list[str]) -> None:
    done = left(**environment)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (3, said, "")


def test_closed_streams_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # as Python has it after >&-
    open_closed_streams()
    print("goes nowhere", flush=True)
    print("goes nowhere", file=sys.stderr, flush=True)
    sys.stdout.close()
    sys.stderr.close()


CLOSED = """
import os, sys
from launch.program.ending import open_closed_streams
open_closed_streams()
file = os.open("opened.txt", os.O_WRONLY | os.O_CREAT)
print("goes nowhere", flush=True)
for descriptor in (1, 2):
    os.write(descriptor, b"goes nowhere")
os.system("echo goes nowhere; echo goes nowhere >&2")
os.write(file, f"{file > 2} {sys.stdin} {os.read(0, 1)}".encode())
"""


def test_no_file_gets_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command, sys.executable, CLOSED], cwd=tmp_path, env=environment)
    assert done.returncode == 0
    assert (tmp_path / "opened.txt").read_text() == "True None b''"


def test_a_reader_that_is_gone_changes_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = left(writing, WORLD_SIZE="2", RANK="1")
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("prompt.text is empty"), 2, "prompt.text is empty"),
        (
            ValueError(f"lines={'x' * 100_000} cannot be read"),
            2,
            f"lines={'x' * 1994} [...] {'x' * 1985} cannot be read",
        ),
        (SharedError("prompt.text is empty", is_mistake=True), 2, ""),
        (SharedError("out of memory"), 1, ""),
        (PeerFailure("lost the connection"), 1, "lost the connection"),
        (RunFailure("first tokens differ"), 1, "first tokens differ"),
        (OSError(28, "No space left on device", "run.json"), 1, "run.json: No space left on device"),
        (PermissionError(13, "Permission denied", "keys"), 2, "keys: Permission denied"),
        (RuntimeError("one\ntwo"), 1, "RuntimeError: one"),
        (MemoryError(), 1, "out of memory (MemoryError: MemoryError); use more ranks, a shorter prompt or fewer"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(15), 143, "ended by SIGTERM"),
        (SystemExit(1), 1, ""),
    ],
)
def test_an_error_has_its_status_and_its_line_last_under_torchrun(
    error: BaseException,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reply = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))

    def program(args: Sequence[str]) -> int:
        end_with(error, None)

    assert exit_status(program, []) == status
    assert one_line_error(capsys).startswith(said)
    if isinstance(error, SystemExit):
        assert not reply.exists()
        return
    # What torchrun makes of it, with a rank that it has ended itself.
    failed = ProcessFailure(local_rank=1, pid=2, exitcode=status, error_file=str(reply))
    ended = ProcessFailure(local_rank=0, pid=1, exitcode=-15, error_file="none")
    ended.timestamp = failed.timestamp + 1
    *_, line, border = str(ChildFailedError("infer", {0: ended, 1: failed})).splitlines()
    assert line.startswith(f"  traceback : {said or str(error)}")
    assert set(border) == {"="}


RUN = ["model=random", "model.config=no/such.json", "ranks.threads=1"]
MISTAKES: dict[str, tuple[Callable[[Sequence[str]], int], list[str], str]] = {
    "infer": (infer.main, [*RUN, "prompt.text=a"], "no/such.json"),
    "serve": (serve.main, [*RUN, "serve.api_key_file=no/keys"], "no/keys"),
    "bench": (bench.main, [*RUN, "bench.results=no/such/x.jsonl"], "no/such"),
    "evaluate": (evaluate.main, [*RUN, "policies=[full,snapvk]"], "did you mean snapkv?"),
    "doctor": (doctor.main, [*RUN, "doctor.out=/dev/null/x"], "/dev/null"),
    "first_day": (first_day.main, ["first_day.out=/dev/null/x"], "/dev/null"),
    "search": (search.main, [*RUN, "table=no/such/x.json"], "no/such"),
    "plan": (plan.main, ["model=random", "model.config=no/such.json", "tokens=4k", "device=h100"], "no/such.json"),
    "show": (show.main, ["no/such.json"], "no/such.json"),
    "skew": (skew.main, [*RUN, "out=no/such/x"], "no/such"),
    "fit_kvzap": (fit_kvzap.main, [*RUN, "out=no/such/x"], "no/such"),
    "retrieval_heads": (retrieval_heads.main, [*RUN, "out=no/such/x"], "no/such"),
    "exact_layers": (exact_layers.main, RUN, "no/such.json"),
    "duo_gates": (duo_gates.main, [*RUN, "out=no/such/x"], "no/such"),
    "encode": (encode.main, [*RUN, "schema=no/such.xml", "out=x"], "no/such"),
}
"""A mistake that is not found by reading the command line, by program."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_status_2_in_every_program(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, args, says = MISTAKES[name]
    assert exit_status(program, args) == 2
    assert says in one_line_error(capsys)
    assert exit_status(program, ["--nothing"]) == 2
    assert "unknown flag --nothing" in one_line_error(capsys)
    assert list(tmp_path.iterdir()) == []
