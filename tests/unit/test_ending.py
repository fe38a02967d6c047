"""How a program leaves: as a rank of a job, without Python being taken down under the threads of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_reader_that_is_gone_changes_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = left(writing, WORLD_SIZE="2", RANK="1")
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "")
