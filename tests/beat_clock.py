"""A clock for watchers that goes as fast as the slowest rank that is alive, however busy the machine is."""

from __future__ import annotations

import time

from runahead.ranks import watcher
from runahead.ranks.heartbeat import PERIOD_S, Heartbeat
from runahead.ranks.ranks import Ranks


class BeatClock:
    """Replaces the module `time`: counts the beats of all ranks but the one that is to fall silent.

    It goes on from the time at which it is made, since a watcher that runs takes the difference of the two.
    """

    def __init__(self, heartbeat: Heartbeat, silent: int) -> None:
        self._heartbeat, self._silent = heartbeat, silent
        self._began_s = time.monotonic() - self._beaten_s()

    def monotonic(self) -> float:
        return self._began_s + self._beaten_s()

    def _beaten_s(self) -> float:
        return PERIOD_S * min(beat for rank, beat in enumerate(self._heartbeat.seen) if rank != self._silent)


def give_up_silent(ranks: Ranks, timeout_s: float, silent: int) -> None:
    """Give up, from now on, a rank that is silent for so long by this clock, so only the one that is to be."""
    assert ranks._heartbeat is not None and ranks._watcher is not None
    watcher.time = BeatClock(ranks._heartbeat, silent)  # type: ignore[assignment]
    ranks.timeout_s = ranks._watcher._timeout_s = timeout_s


def keep_beats(silent: int) -> None:
    """Have this process, which is to be a rank, tell silence by this clock from the beginning."""
    start = watcher.Watcher.start

    def with_clock(self: watcher.Watcher) -> None:
        watcher.time = BeatClock(self._heartbeat, silent)  # type: ignore[assignment]
        start(self)

    watcher.Watcher.start = with_clock  # type: ignore[method-assign]
