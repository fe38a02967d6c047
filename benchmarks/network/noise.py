"""Random noise on a network: a thread changes the rate of one link after the other.

The paper (Fig. 11) sends traffic both ways between a random pair of neighbours, which takes bandwidth from it. Here the
rate itself changes, in both directions on one random link at a time, so that two runs with the same seed get the same
noise.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.network.shaped_network import ShapedNetwork


class RateChange(NamedTuple):
    link: int
    gbps: float


class Noise:
    """Context manager that gives a random link a random rate, every 0.5 to 1.5 times `period_s`.

    The rate is `low` to `high` times the network's. The other links have the full rate, and at the end so do all.
    `changes` records the changes in order.

    Raises: ValueError for invalid shares or an invalid period; on leaving the block, the exception that stopped the
    thread, if any.
    """

    def __init__(
        self, network: ShapedNetwork, *, seed: int, low: float = 0.25, high: float = 1.0, period_s: float = 0.5
    ) -> None:
        if not 0 < low <= high:
            raise ValueError(f"noise between {low} and {high} of the rate is not possible; use 0 < low <= high")
        if period_s <= 0:
            raise ValueError(f"noise with a period of {period_s} s is not possible; use a positive one")
        self.changes: list[RateChange] = []
        self._network = network
        self._random = random.Random(seed)
        self._low, self._high, self._period_s = low, high, period_s
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(1, "link noise")

    def __enter__(self) -> Self:
        self._running = self._threads.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._threads.shutdown()
        if error is None:
            self._running.result()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            link = self._random.randrange(self._network.num_links)
            gbps = self._network.gbps * self._random.uniform(self._low, self._high)
            if self.changes and self.changes[-1].link != link:
                self._network.set_rate(self._network.gbps, link=self.changes[-1].link)
            self._network.set_rate(gbps, link=link)
            self.changes.append(RateChange(link, gbps))
            stopped = self._stop.wait(self._period_s * self._random.uniform(0.5, 1.5))
        self._network.set_rate(self._network.gbps)
