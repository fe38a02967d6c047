"""Programs that run inside a test."""

from __future__ import annotations

import os

import pytest


class Exited(BaseException):
    """In place of os._exit."""


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure ends the test, not the tests."""

    def leave(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", leave)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
