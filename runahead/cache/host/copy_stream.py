"""CUDA stream for copies between host memory and a GPU, which run in order and overlap with compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from runahead.ranks.accelerator import Accelerator, Event, accelerator_for

MOVED_AT_ONCE = 2
"""Most layers in flight to the host before the host waits for one, since it queues copies faster than they run."""


class CopyStream:
    """The copies of one cache, on a stream that all caches of a GPU share.

    Every copy is queued after all compute so far, so memory that this stream's tensors free is reused only after
    everything that read it. Compute that uses the result of a copy waits for the copy's mark.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.device, self._accelerator = accelerator.device, accelerator
        self._stream = accelerator.stream("copies between host and device")
        self._moving: deque[Event] = deque()

    @contextmanager
    def copying(self, *read: Tensor) -> Iterator[None]:
        """Context in which operations are queued on this stream and new tensors belong to it.

        Args:
            read: tensors of the compute stream whose memory must not be reused before the copy is done.
        """
        self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.on(self._stream):
            yield
        for tensor in read:
            tensor.record_stream(self._stream)

    def mark(self) -> Event:
        """An event after all copies so far."""
        return self._stream.record_event()

    def hold_compute(self, mark: Event | None = None) -> None:
        """Let all later compute wait for a mark, by default for all copies so far. The host does not wait."""
        self._accelerator.current_stream().wait_event(self.mark() if mark is None else mark)

    def pace(self) -> None:
        """Called after a layer's copy to the host; waits for an earlier one, so that few of them occupy the device."""
        self._moving.append(self.mark())
        if len(self._moving) > MOVED_AT_ONCE:
            self._moving.popleft().synchronize()

    def finish(self) -> None:
        """Block the host until all copies and all compute before them are done."""
        self._stream.wait_stream(self._accelerator.current_stream())
        self._stream.synchronize()


def copies_for(device: torch.device) -> CopyStream | None:
    """A stream of copies to and from this device; None for a CPU, which computes from host memory."""
    accelerator = accelerator_for(device)
    return None if accelerator is None else CopyStream(accelerator)
