"""Marks in time on the device that does the work, read as seconds of one host clock once the work is done."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """A mark costs nothing that would disturb what is timed; `seconds` may wait for the device."""

    def mark(self) -> object: ...

    def seconds(self, mark: object) -> float:
        """Seconds of `time.perf_counter` at a mark; a float is such a time already."""
        ...


class HostClock:
    """On the CPU an operation has ended when its call returns."""

    def mark(self) -> object:
        return time.perf_counter()

    def seconds(self, mark: object) -> float:
        assert isinstance(mark, float)
        return mark


class CudaClock:
    """On a GPU calls only queue work: marks are events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._origin = self._event()
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def mark(self) -> object:
        return self._event()

    def seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
