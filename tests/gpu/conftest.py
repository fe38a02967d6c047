"""The tests of this folder run on a GPU, or where there is none on a virtual one, which computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conftest import RankPools
from tests.virtual.cuda import gpu
from tests.virtual.cuda.guard import require_guard

HAS_GPU = torch.cuda.is_available()
"""A real one."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")


@pytest.fixture(scope="package", autouse=True)
def a_gpu(own_cache: object) -> Iterator[None]:
    """A GPU for the tests of this folder, which those of other folders do not see."""
    if not HAS_GPU:
        require_guard()
    with gpu():
        yield


@pytest.fixture
def is_virtual() -> None:
    """Skips tests of the virtual GPU itself where there is a real one."""
    if HAS_GPU:
        pytest.skip("a real GPU is here")


class NcclPools(RankPools):
    """Ranks over NCCL, which have a GPU each. A test is skipped where there are fewer."""

    def __init__(self) -> None:
        super().__init__("cuda", "nccl")

    def run(self, size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        if HAS_GPU and torch.cuda.device_count() < size:
            pytest.skip(f"NCCL wants a GPU per rank; {size} ranks, {torch.cuda.device_count()} GPUs")
        return super().run(size, task, *args)


@pytest.fixture(scope="package")
def gpu_ranks() -> Iterator[RankPools]:
    """Ranks over Gloo that share out the GPUs; virtual ones have one each."""
    pools = RankPools("cuda")
    yield pools
    pools.close()


@pytest.fixture(scope="package")
def nccl_ranks() -> Iterator[NcclPools]:
    """Ranks over NCCL; on virtual GPUs over what takes its place (tests/virtual/cuda/nccl.py)."""
    pools = NcclPools()
    yield pools
    pools.close()
