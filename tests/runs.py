"""Choice and order of a run's tests, and what it says of those that failed; a plugin of pytest."""

from __future__ import annotations

import gc
import math
import os
import random
import zlib
from typing import Any

import pytest

LONGEST = (
    "tests/doctor/",
    "tests/faults/",
    "tests/gpu/",
    "tests/virtual/",
    "tests/policies/test_matrix.py",
    "tests/ranks/",
    "tests/launch/",
    "tests/differential/",
    "tests/golden/",
    "tests/bench/",
    "tests/serving/",
    "tests/evaluation/",
    "tests/partitioner/",
    "tests/policies/",
    "tests/prompt_cache/",
    "tests/model/",
    "tests/test_documents.py",
    "tests/fuzz/",
    "tests/decoding/",
)
"""Files that take long, the longest first: what begins last decides when all are done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, default=1, help="run about one in so many tests, the same ones every time")
    parser.addoption("--again", action="store_true", help="with --last-failed: say which tests fail only now and then")


@pytest.hookimpl(tryfirst=True)  # before what is marked slow is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All but a sample of tests marked `sampled` are slow. Where tests run side by side: the longest files first."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, sets in functions.items():
        [one_in] = sets[0].get_closest_marker("sampled").args
        often = random.Random(name).sample(sets, math.ceil(len(sets) / one_in))
        for item in sets:
            if item not in often:
                item.add_marker("slow")
    one_in = config.getoption("sample")
    left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % one_in]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % one_in == 0]
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    places = {item: next((n for n, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)) for item in items}
    items.sort(key=places.__getitem__)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at what libraries and thousands of tests hold, each time anew."""
    gc.collect()
    gc.freeze()


UNFINISHED = pytest.StashKey[bool]()
"""A process of the tests has ended early, and what it had not run yet is not run by others."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    if error is not None:
        node.config.stash[UNFINISHED] = True


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that ended early counts as interrupted: running again what has failed would not make it whole."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED and (
        session.shouldfail or session.config.stash.get(UNFINISHED, False)
    ):
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what failed beside other tests and passes alone."""
    if config.getoption("again"):
        for report in terminalreporter.getreports("passed"):
            terminalreporter.write_line(
                f"FLAKY {report.nodeid}: failed, and passes when it runs alone", red=True, bold=True
            )
