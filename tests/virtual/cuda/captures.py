"""The capture of a CUDA graph that a thread is in, and the errors of operations that a capture refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
PAGEABLE = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."


class Capture(Protocol):
    """Attributes: has_failed: it cannot succeed any more."""

    has_failed: bool

    def record(
        self,
        func: OpOverload,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host: Collection[Tensor] = (),
    ) -> Any: ...

    def queue(self, stream: int, task: Callable[[], None]) -> None: ...


class _Capturing(threading.local):
    capture: Capture | None = None


CAPTURING = _Capturing()
"""The capture of each thread."""


def refuse_in_capture(message: str = NOT_PERMITTED) -> None:
    """Do nothing outside captures. Raises: AcceleratorError, in one, which cannot succeed any more."""
    if CAPTURING.capture is not None:
        CAPTURING.capture.has_failed = True
        raise torch.AcceleratorError(message)
