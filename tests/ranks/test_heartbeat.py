"""End of a heartbeat."""

from __future__ import annotations

import threading

import torch.distributed as dist

from runahead.ranks.heartbeat import PERIOD_S, Heartbeat


class SlowStore:
    """A store that takes three periods for a beat."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.asked.set()
        threading.Event().wait(3 * PERIOD_S)

    def check(self, keys: list[str]) -> bool:
        return False


def test_closing_waits_for_a_request_under_way() -> None:
    """A thread that comes back from the store while the interpreter ends would abort the process."""
    store = dist.HashStore()
    heartbeat, slow = Heartbeat(store, 0, 1, computing=None), SlowStore()
    heartbeat._beats = slow  # type: ignore[assignment]
    heartbeat.start([])
    assert slow.asked.wait(60)
    heartbeat.close()
    assert not heartbeat._thread.is_alive()
