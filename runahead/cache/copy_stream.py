"""CUDA stream for copies between host memory and a GPU, which run in order and overlap with compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOVED_AT_ONCE = 2
"""Most layers in flight to the host before the host waits for one, since it queues copies faster than they run."""


class CopyStream:
    """Stream of one cache's copies.

    Every copy is queued after all compute so far, so memory that this stream's tensors free is reused only after
    everything that read it. Compute that uses the result of a copy waits for the copy's mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._moving: deque[torch.cuda.Event] = deque()

    @contextmanager
    def copying(self, *read: Tensor) -> Iterator[None]:
        """Context in which operations are queued on this stream and new tensors belong to it.

        Args:
            read: tensors of the compute stream whose memory must not be reused before the copy is done.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        for tensor in read:
            tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """An event after all copies so far."""
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def hold_compute(self, mark: torch.cuda.Event | None = None) -> None:
        """Let all later compute wait for a mark, by default for all copies so far. The host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(self.mark() if mark is None else mark)

    def pace(self) -> None:
        """Called after a layer's copy to the host; waits for an earlier one, so that few of them occupy the device."""
        self._moving.append(self.mark())
        if len(self._moving) > MOVED_AT_ONCE:
            self._moving.popleft().synchronize()

    def finish(self) -> None:
        """Block the host until all copies and all compute before them are done."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._stream.synchronize()


def copies_for(device: torch.device) -> CopyStream | None:
    """A stream of copies to and from this device; None for a CPU, which computes from host memory."""
    return CopyStream(device) if device.type == "cuda" else None
