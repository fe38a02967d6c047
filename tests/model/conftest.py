"""Fixtures of these tests: whose products in float32 are a CPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runahead.model.layers import cpu_linear
from runahead.model.layers.cpu_linear import takes_onednn
from tests.needs import missing


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products in float32 are oneDNN's, whoever made the processor."""
    takes_onednn.cache_clear()
    monkeypatch.setattr(cpu_linear, "maker", lambda: "AuthenticAMD")
    if not takes_onednn():
        missing("oneDNN and MKL")
    yield
    takes_onednn.cache_clear()


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products in float32 are those of PyTorch's choice, whoever made the processor."""
    takes_onednn.cache_clear()
    monkeypatch.setattr(cpu_linear, "maker", lambda: "")
    assert not takes_onednn()
    yield
    takes_onednn.cache_clear()
