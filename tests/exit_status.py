"""Programs that run inside a test: where they end by os._exit, a test gets an exception (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


class Exited(BaseException):
    """Raised in place of os._exit, which would end the tests."""

    def __init__(self, status: int) -> None:
        super().__init__(f"os._exit({status})")
        self.status = status


def exit_status(program: Callable[[Any], int], args: Sequence[str]) -> int:
    try:
        return program(args)
    except Exited as exited:
        return exited.status


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The text on stderr, which is one line."""
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    return error
