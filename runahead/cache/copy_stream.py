"""A stream of its own for copies between the host's memory and a GPU: beside what the GPU computes, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOVED_AT_ONCE = 2
"""Layers on their way to the host before the host waits for one: it queues work far faster than the device does it."""


class CopyStream:
    """Copies of one cache.

    Every copy is queued behind all that was computed before, so memory that this stream's tensors leave behind is
    written again only after whatever read them. What computes with the result of a copy waits for the copy's mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._moving: deque[torch.cuda.Event] = deque()

    @contextmanager
    def copying(self, *read: Tensor) -> Iterator[None]:
        """What is queued inside is a copy, and tensors that are made inside belong to this stream.

        Args:
            read: tensors of the compute stream whose memory is not to be used again before the copy is over.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in read:
            tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Of all copies so far."""
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def hold_compute(self, mark: torch.cuda.Event | None = None) -> None:
        """Let what is computed from now on wait for a mark, or for all copies so far. The host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(self.mark() if mark is None else mark)

    def pace(self) -> None:
        """A layer has been sent to the host: wait for an earlier one, so that few of them take up the device."""
        self._moving.append(self.mark())
        if len(self._moving) > MOVED_AT_ONCE:
            self._moving.popleft().synchronize()

    def finish(self) -> None:
        """Let the host wait for all copies, and for all that was computed before."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._stream.synchronize()


def copies_for(device: torch.device) -> CopyStream | None:
    """None where the host's memory is what is computed from."""
    return CopyStream(device) if device.type == "cuda" else None
