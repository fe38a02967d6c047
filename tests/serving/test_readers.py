"""Threads that read bodies: after a long one that is refused its client waits, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from launch.server.errors import APIError
from launch.server.request import readers
from launch.server.request.readers import LONGEST_REST_S, REST, SHORT_BYTES, Readers
from tests.serving.fakes import serving
from tests.serving.test_api import CHAT, TEXT, connection_of, post
from tests.waiting import until

LONG = SHORT_BYTES + 1


class Clock:
    """Time that goes on as reading says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(readers, "time", clock := Clock())
    return clock


def read(clock: Clock, seconds: float, error: BaseException | None = None) -> Any:
    clock.now_s += seconds
    if error is not None:
        raise error
    return seconds


def ended(pool: Readers) -> None:
    """Wait until the threads have ended."""
    for each in pool._pools.values():
        each.shutdown(wait=True)


def rest_of(clock: Clock, pool: Readers, num_bytes: int, seconds: float, error: Exception | None) -> float:
    """Seconds that the client of a body waits after it was read; 0 if it was taken."""

    async def ask() -> float:
        try:
            assert await pool.run(num_bytes, lambda: read(clock, seconds, error)) == seconds and error is None
        except Exception as found:
            assert found is error
        return getattr(error, "rest_s", 0.0)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "error", "rest_s"),
    [
        (LONG, 0.25, APIError(400, "too long"), REST * 0.25),
        (LONG, 100.0, APIError(400, "too long"), LONGEST_REST_S),
        (LONG, 0.25, None, 0),
        (SHORT_BYTES, 0.25, APIError(400, "too long"), 0),
        (LONG, 0.25, KeyError("a mistake"), 0),
    ],
)
def test_the_client_of_a_long_body_that_is_refused_waits(
    clock: Clock, num_bytes: int, seconds: float, error: Exception | None, rest_s: float
) -> None:
    pool = Readers()
    assert rest_of(clock, pool, num_bytes, seconds, error) == rest_s
    ended(pool)


def test_refusals_are_told_one_after_another(clock: Clock) -> None:
    pool = Readers()
    rests_s = [rest_of(clock, pool, LONG, 0.25, APIError(400, "too long")) for _ in range(4)]
    assert rests_s == [0.5, 0.75, 1.0, 1.25], "each is told 2 * 0.25 s after the one before, and was read for 0.25 s"
    clock.now_s += 100
    assert rest_of(clock, pool, LONG, 0.25, APIError(400, "too long")) == 0.5
    ended(pool)


def test_long_bodies_are_read_while_refused_clients_wait_until_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "REST", 1e12)
    monkeypatch.setattr(readers, "LONGEST_REST_S", 1e6)
    filling = {"user": "x" * LONG, "max_tokens": 1}
    with serving() as served, ExitStack() as opened:
        number = readers.THREADS[False] + 1
        refused = [opened.enter_context(connection_of(served, filling | {"prompt": []})) for _ in range(number)]
        until(lambda: served.api._readers._told_s > 1e6 * number)
        assert post(served, TEXT, filling | {"prompt": [5, 6, 7]}).status_code == 200
        assert post(served, CHAT, {}).status_code == 400, "a short one"
        assert served.api.metrics._ended["400"] == 1
        for each in refused:
            each.close()
        until(lambda: served.api.metrics._ended["400"] == 1 + number)


def test_what_nobody_waits_for_any_more_is_not_read(clock: Clock) -> None:
    pool, gate, was_read = Readers(), threading.Event(), list[int]()

    async def ask() -> None:
        first = asyncio.create_task(pool.run(1, lambda: gate.wait(60)))
        second = asyncio.create_task(pool.run(1, lambda: was_read.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        assert await first

    asyncio.run(ask())
    ended(pool)
    assert not was_read
