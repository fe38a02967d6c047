"""Who is given up, and why: decided from counters alone."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from runahead.failures import PeerFailure
from runahead.ranks.watcher import Wait, Watcher

TIMEOUT_S = 2.0
STEP_S = 0.1


class Counters(SimpleNamespace):
    """A heartbeat's view of three ranks; this is rank 2."""

    def __init__(self) -> None:
        super().__init__(seen=[0, 0, 0], seen_work=[0, 0, 0], asking_since=None, times_asked=0)


def watch(seconds: float, alive: set[int], working: set[int], peers: list[int]) -> Wait:
    """Rank 2 waits for `peers` while some ranks' counters move."""
    wait = Wait("the KV of layer 1 from rank 1", 2, peers, lambda: "8 bytes, receive posted", TIMEOUT_S)
    counters: Any = Counters()
    for step in range(round(seconds / STEP_S)):
        if step % 3 == 0:  # heartbeats are slower than looks
            for rank in alive:
                counters.seen[rank] += 1
            for rank in working:
                counters.seen_work[rank] += 1
        wait.look(counters, STEP_S)
        if wait.verdict is not None:
            break
    return wait


def test_silent_peer_is_given_up_after_the_timeout() -> None:
    assert watch(TIMEOUT_S - STEP_S, {0, 2}, {0}, [1]).verdict is None
    wait = watch(TIMEOUT_S + 1, {0, 2}, {0}, [1])
    assert wait.silent == [1]
    assert wait.verdict is not None
    assert wait.verdict.startswith(
        "rank 1 has been silent for 2 s; waited 0 s for the KV of layer 1 from rank 1 (8 bytes"
    )
    assert wait.verdict.endswith("(ranks.timeout_s=2)")


def test_peer_that_waits_is_not_silent() -> None:
    assert watch(20, {0, 1, 2}, {0}, [1]).verdict is None


def test_silence_of_a_rank_that_nobody_waits_for_is_no_failure_while_others_work() -> None:
    assert watch(20, {1, 2}, {1}, [1]).verdict is None


def test_where_nobody_works_the_silent_one_is_the_cause_whoever_waits_for_it() -> None:
    wait = watch(TIMEOUT_S + 2, {1, 2}, set(), [1])
    assert wait.silent == [0]
    assert wait.verdict is not None
    assert wait.verdict.startswith("rank 0 has been silent")


def test_all_alive_and_nobody_working_is_a_dead_link() -> None:
    assert watch(TIMEOUT_S, {0, 1, 2}, set(), [1]).verdict is None
    wait = watch(TIMEOUT_S + 2, {0, 1, 2}, set(), [1])
    assert wait.silent == []
    assert wait.verdict is not None
    assert wait.verdict.startswith("no rank made progress for 3 s though all are alive; waited")
    assert "8 bytes, receive posted" in wait.verdict


def test_waiting_for_the_own_device_alone_is_never_a_dead_link() -> None:
    assert watch(20, {0, 1, 2}, set(), [2]).verdict is None


@pytest.mark.parametrize(("owed_s", "is_told"), [(0.2, False), (1.5, True)])
def test_store_that_owes_an_answer_is_spoken_of(monkeypatch: pytest.MonkeyPatch, owed_s: float, is_told: bool) -> None:
    monkeypatch.setattr("runahead.ranks.watcher.time.monotonic", lambda: 100.0)
    counters: Any = Counters()
    counters.asking_since = 100.0 - owed_s
    wait = Wait("a token", 2, [1], None, TIMEOUT_S)
    for _ in range(round(TIMEOUT_S / STEP_S) + 2):
        wait.look(counters, STEP_S)
    assert wait.verdict is not None
    assert ("the network may be cut" in wait.verdict) is is_told


def moments_until_verdict(answer_s: float) -> float | None:
    """Seconds until rank 2 gives up rank 1, all of whose beats come in answers of a store that take so long."""
    wait, counters = Wait("a token", 2, [1], None, TIMEOUT_S), Counters()
    given: Any = counters
    for step in range(round(10 * TIMEOUT_S / STEP_S)):
        if step % round(answer_s / STEP_S) == 0:  # one has come, and the next question is under way
            counters.seen[1] += 1
            counters.seen_work = [step] * 3
            wait.look(given, STEP_S)
            counters.times_asked += 1
            counters.asking_since = 0.0
        else:
            wait.look(given, STEP_S)
        if wait.verdict is not None:
            assert "rank 1 has been silent" in wait.verdict
            return step * STEP_S
    return None


def test_an_answer_is_as_old_as_its_question() -> None:
    assert moments_until_verdict(TIMEOUT_S / 4) is None
    found_s = moments_until_verdict(TIMEOUT_S * 0.8)
    assert found_s is not None
    assert found_s < 1.5 * TIMEOUT_S


def watcher_beside_work(rounds: int) -> tuple[Watcher, Any]:
    """Rank 2's watcher, which looked so often while rank 1 was silent and rank 2 waited for it again and again."""
    counters: Any = Counters()
    counters.failure, counters.looking, counters.waiting = None, nullcontext, nullcontext
    watcher = Watcher(counters, 2, TIMEOUT_S)
    with suppress(PeerFailure), watcher.watching("the next work item", [1]):
        for _ in range(rounds):
            with watcher.waiting("a token", [1]) as wait:
                counters.seen[0] += 1
                counters.seen_work[2] += 1
                watcher._looked_at(STEP_S)
                if (failure := watcher.failure(wait)) is not None:
                    raise failure
        if (failure := watcher.failure()) is not None:
            raise failure
    return watcher, counters


def test_a_silent_peer_is_found_in_many_short_waits() -> None:
    watcher, _ = watcher_beside_work(round(TIMEOUT_S / STEP_S) - 1)
    assert watcher.last_failed is None and watcher.failure() is None
    watcher, _ = watcher_beside_work(round(TIMEOUT_S / STEP_S) + 2)
    failed = watcher.last_failed
    assert failed is not None and failed.silent == [1]
    verdict = "rank 1 has been silent for 2 s; the next work item was awaited beside other work (ranks.timeout_s=2)"
    assert failed.verdict == verdict


def test_a_watch_ends_with_its_block() -> None:
    watcher, counters = watcher_beside_work(1)
    for _ in range(100):
        watcher._looked_at(STEP_S)
    assert watcher.failure() is None and counters.seen[1] == 0
