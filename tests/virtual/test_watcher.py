"""A rank whose GPU never comes to an event ends, whichever of its threads waits and for whom."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from runahead.config import Transfer
from runahead.failures import PeerFailure
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.ranks.ranks import LEAST_LIMIT_S, LIMIT_FACTOR
from runahead.ranks.transfer_records import TransferRecord
from runahead.ranks.watcher import Watcher
from tests.virtual.device import Job
from tests.virtual.jobs import chain
from tests.waiting import until

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


def error_of(call: Callable[[], object]) -> BaseException | None:
    """The exception of a call in a thread that the test does not wait for; fails if the call does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60.0)
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
    """A wait of a forward over shares of layers ends, then an all-reduce never does."""
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


class Alive:
    """Heartbeats of two ranks that are alive, seen by rank 0; the other one waits."""

    failure, is_end, asking_since, times_asked = None, False, None, 0

    def __init__(self) -> None:
        self._beat = self._work = self._busy = 0

    @property
    def seen(self) -> list[int]:
        self._beat += 1
        return [self._beat, self._beat]

    @property
    def seen_work(self) -> list[int]:
        self._work += self._busy > 0
        return [self._work, 0]

    def progress(self) -> None:
        self._work += 1

    def also_computes(self, thread: int) -> None:
        pass

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._busy += 1
        yield
        self._busy -= 1
        self.progress()


class TestACallThatNeverEnds:
    """All ranks are alive, and each waits for the others in a call with collectives."""

    @pytest.fixture
    def seconds(self) -> list[float]:
        """Seconds that the ranks' clock shows."""
        return [0.0]

    @pytest.fixture
    def ranks(self, seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setattr("runahead.ranks.watcher.STANDSTILL_S", 0.1)
        ranks: Any = Job(2).ranks[0]
        ranks.accelerator = SimpleNamespace(enter_thread=lambda: None, synchronize=lambda: None)
        ranks._heartbeat = Alive()
        ranks._watcher = Watcher(ranks._heartbeat, 0, TIMEOUT_S)
        monkeypatch.setattr(ranks, "_now_s", lambda: seconds[0])
        ranks._watcher.start()
        yield ranks
        ranks._watcher.close()

    def ends(self, ranks: Any, seconds: list[float], limit_s: float) -> str:
        """The error of a call, which stands until the clock has passed the limit."""

        def never() -> None:
            seconds[0] += limit_s
            threading.Event().wait()

        def pass_limit() -> None:
            until(lambda: ranks._watcher.num_waits > 0)
            first = ranks._heartbeat._beat
            until(lambda: ranks._heartbeat._beat > first + 20)  # looks of the watcher, for more than TIMEOUT_S
            given_up.append(ranks.waiting_for.verdict)
            seconds[0] += 1

        given_up = list[str | None]()
        threading.Thread(target=pass_limit, daemon=True).start()
        error = error_of(lambda: ranks.collectively("an all-reduce", never))
        assert given_up == [None]
        return str(error)

    def test_is_given_up_after_ten_minutes(self, ranks: Any, seconds: list[float]) -> None:
        error = self.ends(ranks, seconds, LEAST_LIMIT_S)
        assert re.search(r"^no rank made progress for .* though all are alive; waited \d+ s for an all-reduce", error)

    def test_or_after_many_times_the_longest_call_before(self, ranks: Any, seconds: list[float]) -> None:
        ranks.collectively("a long forward", lambda: seconds.__setitem__(0, 100.0))
        assert self.ends(ranks, seconds, LIMIT_FACTOR * 100).startswith("no rank made progress")

    def test_at_once_where_it_waits_for_a_rank_itself(self, ranks: Any) -> None:
        """A forward waits so for keys and values of the stage before."""

        def arrives(block_s: float) -> bool:
            time.sleep(block_s)
            return False

        def body() -> None:
            ranks.wait_until(arrives, "the KV of layer 3", [1])

        error = error_of(lambda: ranks.collectively("an all-reduce", body))
        assert re.search(r"^no rank made progress for .* though all are alive", str(error))
