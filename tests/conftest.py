"""Set-up of all tests: one thread, the same examples on every run, ranks that stay between tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from runahead.files import cache_folder
from tests.examples import FEW, MANY
from tests.exit_status import Exited
from tests.needs import TEST_KERNELS
from tests.rank_pool import RankPool
from tests.virtual.cuda import guard

torch.set_num_threads(1)
logging.set_verbosity_error()
settings.register_profile("few", derandomize=True, deadline=None, database=None, max_examples=FEW)
settings.register_profile("many", settings.get_profile("few"), max_examples=MANY)  # make test-slow
settings.load_profile("few")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the programs that tests interrupt inherit it

pytest_plugins = ["tests.runs", "pytester"]


def pytest_report_header() -> str:
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "virtual GPU, computed on the CPU"
    return f"tests/gpu: {found}"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, in which the user's downloaded model is but none of what runs have learned."""
    folder, users = tmp_path_factory.mktemp("cache"), cache_folder()
    for name in (guard.FOLDER, TEST_KERNELS):  # what is compiled for tests stays
        (users / name).mkdir(parents=True, exist_ok=True)
    for path in users.iterdir():
        if path.is_dir() and path.name not in ("splits", "tables", "gguf", "checks", "kernels"):
            (folder / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        if any(folder.iterdir()):  # else a test downloads the model, once and for all
            patch.setenv("RUNAHEAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def ranks_of_one_thread() -> Iterator[None]:
    """Ranks that a test starts in its own process have one thread, as this process has: other tests run beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runahead.ranks.ranks.default_threads", lambda local_size: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_end_of_the_tests() -> Iterator[None]:
    """A program that fails inside a test ends that test and not the process of all tests; it is the only rank."""
    leave, tests = os._exit, os.getpid()

    def instead(status: int) -> None:
        if os.getpid() != tests:  # a forked child
            leave(status)
        raise Exited(status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", instead)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RUNAHEAD_TRACEBACK"):
            patch.delenv(name, raising=False)
        yield


class RankPools:
    """One pool of ranks per size, started when it is first asked for and shared by all tests.

    Args:
        device, backend: of the ranks, as for `RankPool`.
    """

    def __init__(self, device: str = "cpu", backend: str = "gloo") -> None:
        self._device, self._backend = device, backend
        self._pools: dict[int, RankPool] = {}

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `task(ranks, *args)` by rank. A pool where a task raised is not used again: its ranks may hang."""
        if size not in self._pools:
            self._pools[size] = RankPool(size, self._device, self._backend)
        try:
            return self._pools[size].run(task, *args)
        except BaseException:
            self._pools.pop(size).close()
            raise

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()
