"""SLURM is brought up for real where its programs are and the tests run as root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import missing
from tests.slurm.cluster import PROGRAMS, Cluster, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for all tests. What it started is gone afterwards."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        missing(f"no command {absent[0]}; apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        missing("SLURM's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    cluster = Cluster(folder)
    # Batch scripts find themselves and the packages wherever they are submitted.
    cluster.environment |= {
        "RUNAHEAD_SLURM": str(ROOT / "launch" / "slurm"),
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    try:
        cluster.__enter__()
    except TimeoutError as error:
        tails = [path.read_text(errors="replace").strip()[-200:] for path in folder.glob("*.out")]
        missing(f"SLURM does not come up here: {error}; {' | '.join(tails)}")
    try:
        yield cluster
    finally:
        cluster.__exit__(None, None, None)
    wait_until(lambda: not cluster.processes(), "the end of all processes")
