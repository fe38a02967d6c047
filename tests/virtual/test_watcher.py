"""A rank whose GPU never comes to an event ends, whichever of its threads waits and for whom."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from runahead.config import Transfer
from runahead.failures import PeerFailure
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.ranks.transfer_records import TransferRecord
from runahead.ranks.watcher import Watcher
from tests.virtual.device import Job
from tests.virtual.jobs import chain

TIMEOUT_S = 0.3


class SlowEvent:
    """An event of a GPU that happens after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._happens_s = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() >= self._happens_s


NEVER = SlowEvent(float("inf"))


@pytest.fixture
def transfer() -> Iterator[NcclTransfer]:
    """Rank 1's transfer after a prefill of two ranks, whose peer has just been stopped, and which is watched."""
    made: dict[int, NcclTransfer] = {}
    Job(2).run(chain(2, Transfer.relay, after=lambda ranks, transfer: made.update({ranks.rank: transfer})))
    ranks: Any = made[1].ranks
    ranks._heartbeat = SimpleNamespace(
        seen=[3, 3], seen_work=[1, 1], failure=None, is_end=False, asking_since=None, times_asked=0
    )
    ranks._heartbeat.waiting = ranks._heartbeat.busy = nullcontext
    ranks._heartbeat.also_computes = lambda thread: None
    ranks._watcher = Watcher(ranks._heartbeat, ranks.rank, TIMEOUT_S)
    ranks._watcher.start()
    yield made[1]
    ranks._watcher.close()


def error_of(call: Callable[[], object], within_s: float = 60.0) -> BaseException | None:
    """The exception of a call in a thread that the test does not wait for; fails if the call does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "still waiting"
    return errors[0] if errors else None


def forward(transfer: NcclTransfer, event: SlowEvent, after: Callable[[], object]) -> Callable[[], object]:
    """A forward that waits for an event in `NcclTransfer.open`, then does something else."""

    def run() -> None:
        transfer._ended[0] = event  # type: ignore[assignment]
        transfer.open(transfer.depth)
        after()

    return run


def test_a_wait_for_an_event_that_never_happens_ends(transfer: NcclTransfer) -> None:
    error = error_of(forward(transfer, NEVER, lambda: None))
    assert isinstance(error, PeerFailure)
    assert "rank 0 has been silent" in str(error)
    assert re.search(r"waited \d+ s for layer 0 \(no transfer is outstanding\)", str(error))


def test_so_does_one_in_the_thread_of_collectives(transfer: NcclTransfer) -> None:
    ranks = transfer.ranks
    error = error_of(lambda: ranks.collectively("the other ranks' shares", forward(transfer, NEVER, lambda: None)))
    assert isinstance(error, PeerFailure)
    assert "rank 0 has been silent" in str(error)


def test_the_main_thread_is_watched_after_the_other_thread_has_waited(transfer: NcclTransfer) -> None:
    """As in a forward over shares of layers: a wait of the forward ends, then an all-reduce never does."""
    ranks, all_reduce = transfer.ranks, threading.Event()
    body = forward(transfer, SlowEvent(0.15), all_reduce.wait)
    error = error_of(lambda: ranks.collectively("the other ranks' shares", body))
    all_reduce.set()
    assert isinstance(error, PeerFailure)
    assert re.search(r"waited \d+ s for the other ranks' shares", str(error))


def test_the_watcher_does_not_ask_the_gpu(transfer: NcclTransfer) -> None:
    """The call may hang with locks held, and nobody would be left to say so."""
    asked_in = set()

    def ask() -> bool:
        asked_in.add(threading.current_thread().name)
        return False

    record = TransferRecord(direction="receive", peer=0, layer=1, start=0, end=2, num_bytes=16, has_happened=ask)
    record.prefill = transfer._prefill
    transfer.ranks.records.posted(record)
    error = error_of(forward(transfer, NEVER, lambda: None))
    assert "outstanding: receive of layer 1 from rank 0, 16 bytes" in str(error)
    assert asked_in and "watcher" not in asked_in
