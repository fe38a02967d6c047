"""Clocks that mark moments on a CPU or a GPU, and read them as seconds of the host's clock."""

from __future__ import annotations

import time

import torch

from runahead.ranks.accelerator import Accelerator, Event, accelerator_for
from runahead.timeline.ranges import Ranges


class Clock:
    """Clock for a CPU, where an operation has ended when its call returns: marks are seconds.

    Attributes:
        ranges: what is timed has its name there, too.
    """

    def __init__(self, ranges: Ranges | None = None) -> None:
        self.ranges = ranges or Ranges()

    def mark(self) -> object:
        """Mark this moment in the device's work, without waiting for the device."""
        return time.perf_counter()

    def seconds(self, mark: object) -> float:
        """Seconds of `time.perf_counter` at a mark, for which it may wait. A float is returned as it is."""
        assert isinstance(mark, float)
        return mark


class CudaClock(Clock):
    """Clock for a GPU, where calls only queue work: marks are events on the current stream.

    The host waits for the GPU in `seconds` alone, and for no stream but the current one: other streams, and until a
    prefill has ended this one, too, may wait for another rank, which nobody would watch.
    """

    def __init__(self, accelerator: Accelerator, ranges: Ranges | None = None) -> None:
        super().__init__(ranges)
        self._accelerator = accelerator
        self._origin, self._origin_s = self.mark(), 0.0

    def mark(self) -> Event:
        return self._accelerator.mark(timed=True)

    def seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(mark, Event)
        if not self._origin_s:
            now = self.mark()
            now.synchronize()
            self._origin_s = time.perf_counter() - self._origin.elapsed_time(now) / 1e3
        mark.synchronize()
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3


def clock_for(device: torch.device, ranges: Ranges | None = None) -> Clock:
    """The clock for a device."""
    accelerator = accelerator_for(device)
    return Clock(ranges) if accelerator is None else CudaClock(accelerator, ranges)
