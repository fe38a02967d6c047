"""Threads that read bodies: those of long ones rest after what is refused, and after nothing else."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from launch.server.errors import APIError
from launch.server.request import readers
from launch.server.request.readers import LONGEST_REST_S, REST, SHORT_BYTES, Readers


class Clock:
    """Time that goes on as reading says, and what was slept."""

    def __init__(self) -> None:
        self.now_s, self.rests_s, self.when_resting = 0.0, list[float](), lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.rests_s.append(seconds)
        self.when_resting()


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


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "error", "rests_s"),
    [
        (SHORT_BYTES + 1, 0.25, APIError(400, "too long"), [REST * 0.25]),
        (SHORT_BYTES + 1, 100.0, APIError(400, "too long"), [LONGEST_REST_S]),
        (SHORT_BYTES + 1, 0.25, None, []),
        (SHORT_BYTES, 0.25, APIError(400, "too long"), []),
        (SHORT_BYTES + 1, 0.25, KeyError("a mistake"), []),
    ],
)
def test_a_thread_rests_after_a_long_body_that_is_refused(
    clock: Clock, num_bytes: int, seconds: float, error: BaseException | None, rests_s: list[float]
) -> None:
    pool, told = Readers(), threading.Event()
    clock.when_resting = lambda: told.wait(60) or pytest.fail("it rested before it told")

    async def ask() -> None:
        try:
            assert await pool.run(num_bytes, lambda: read(clock, seconds, error)) == seconds and error is None
        except Exception as found:
            assert found is error
        finally:
            told.set()

    asyncio.run(ask())
    ended(pool)
    assert clock.rests_s == rests_s


def test_a_short_body_is_read_while_threads_of_long_ones_rest(clock: Clock) -> None:
    pool, gate = Readers(), threading.Event()
    clock.when_resting = lambda: gate.wait(60)

    async def ask() -> None:
        for _ in range(readers.THREADS[False]):
            with pytest.raises(APIError):
                await pool.run(SHORT_BYTES + 1, lambda: read(clock, 0.1, APIError(400, "too long")))
        long = asyncio.create_task(pool.run(SHORT_BYTES + 1, lambda: read(clock, 0.1)))
        assert await pool.run(SHORT_BYTES, lambda: read(clock, 0.5)) == 0.5
        assert not long.done()
        gate.set()
        assert await long == 0.1

    asyncio.run(ask())
    ended(pool)


def test_what_nobody_waits_for_any_more_is_not_read(clock: Clock) -> None:
    pool, gate, was_read = Readers(), threading.Event(), list[int]()

    async def ask() -> None:
        first = asyncio.create_task(pool.run(1, lambda: gate.wait(60)))
        second = asyncio.create_task(pool.run(1, lambda: was_read.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        gate.set()
        assert await first
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(ask())
    ended(pool)
    assert not was_read
