"""Waiting for what a test has caused, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until `is_so`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
        time.sleep(0.002)
