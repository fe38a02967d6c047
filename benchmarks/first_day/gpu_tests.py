"""tests/gpu of a checkout, by pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

from benchmarks.first_day.visit import Visit
from benchmarks.harness.machine import ROOT
from runahead.failures import RunFailure

FOLDER = ROOT / "tests" / "gpu"
END_S = 40.0
"""Seconds between the end of the tests and the part's limit, in which the rank also starts."""

LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Variables of a launcher, which the tests must not take for theirs."""


def command() -> list[str]:
    """The command line of pytest. A test that hangs prints where it does, and ends alone if pytest-timeout is there."""
    settings = {
        "addopts": "",  # the project's own, of which some are those of plugins that may be missing
        "faulthandler_timeout": "45",
        "faulthandler_exit_on_timeout": "false",  # a slow test must not end the others
    }
    if find_spec("pytest_timeout") is not None:
        settings["timeout"] = "60"
    chosen = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    return [sys.executable, "-m", "pytest", *chosen, "-m", "not slow", "-v", "--maxfail=20", str(FOLDER)]


def run(visit: Visit) -> None:
    """Run the tests, with their output in the part's log.

    Raises:
        RunFailure: one failed, or they took too long.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    process = subprocess.Popen(command(), cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(visit.limit_s - END_S)
    except subprocess.TimeoutExpired:
        raise RunFailure("the tests did not end in time; see the part's log for the last one that began") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what they started
    visit.figures.check("tests/gpu", status == 0, otherwise="tests failed; the part's log names them")
