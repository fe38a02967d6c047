"""Store whose values are looked for until they are there."""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import timedelta

import torch.distributed as dist

LOOK_S = 0.02
"""Seconds between two looks at what is waited for."""


class PolledStore(dist.Store):
    """A store of ours, which C++ calls, too. A value of which nothing is there yet is waited for.

    C++ keeps one half of an object alone, so who makes a store keeps the object for as long as anybody uses it.

    Args:
        patience_s: seconds to wait for a value.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._patience_s = patience_s

    @abstractmethod
    def found(self, key: str) -> bytes | None:
        """The value of a key; None while there is none."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Set a value. Raises: DistError: it cannot be written."""

    @abstractmethod
    def put_first(self, key: str, data: bytes) -> bytes:
        """Set a value that is not there yet, and return what is there then. Raises: DistError: it cannot be written."""

    def set(self, key: str, value: str | bytes) -> None:
        self.put(key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        assert not expected_value, "values are never replaced under a condition"
        return self.put_first(key, _bytes(desired_value))

    def deleteKey(self, key: str) -> bool:  # noqa: N802 (as C++ calls it)
        return self.delete_key(key)

    def get(self, key: str) -> bytes:
        """Raises: DistStoreError: nothing came in time."""
        self.wait([key])
        value = self.found(key)
        assert value is not None, key
        return value

    def check(self, keys: list[str]) -> bool:
        return all(self.found(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises: DistStoreError: nothing came in time."""
        deadline = time.monotonic() + (self._patience_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no value came for {', '.join(keys)}")
            time.sleep(LOOK_S)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
