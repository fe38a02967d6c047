"""The tests of this folder run on a GPU, or where there is none on a virtual one, which computes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.needs import missing
from tests.virtual.cuda import gpu
from tests.virtual.cuda.guard import compiler


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")


@pytest.fixture(scope="package", autouse=True)
def a_gpu(own_cache: object) -> Iterator[None]:
    """A GPU for the tests of this folder, which those of other folders do not see."""
    if not torch.cuda.is_available() and compiler() is None:
        missing("the virtual GPU needs a C++ compiler; install g++, or set CXX")
    with gpu():
        yield
