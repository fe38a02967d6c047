"""Results that several policies ask of the same queries and keys, computed once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Answers:
    """Results by what was asked. The first to ask waits; all others get the same object.

    Args:
        clock_s: returns seconds, after the device has done what was queued.

    Attributes:
        saved_s: seconds that the results that were found had taken, added up.
    """

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._found: dict[Hashable, tuple[Any, float]] = {}
        self.saved_s = 0.0

    def get(self, asked: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, or of an earlier one for the same key."""
        if asked in self._found:
            result, took_s = self._found[asked]
            self.saved_s += took_s
        else:
            began_s = self._clock_s()
            result = compute()
            self._found[asked] = result, self._clock_s() - began_s
        found: T = result
        return found
