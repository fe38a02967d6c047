"""What all tests share: one thread, examples that are the same on every run, and ranks that stay between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from tests.rank_pool import RankPool

torch.set_num_threads(1)
logging.set_verbosity_error()
settings.register_profile("runahead", derandomize=True, deadline=None, database=None)
settings.load_profile("runahead")


class RankPools:
    """One pool of ranks per size, started when it is first asked for and shared by all tests."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `task(ranks, *args)` by rank. A pool where a task raised is not used again: its ranks may hang."""
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        try:
            return self._pools[size].run(task, *args)
        except BaseException:
            self._pools.pop(size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()
