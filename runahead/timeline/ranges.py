"""Named ranges of what a rank does, for a profiler that shows them beside the operators and kernels they start."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.profiler import record_function

from runahead.config import Profile
from runahead.timeline.recording import ProfilerRecording, recorded

P = ParamSpec("P")
T = TypeVar("T")

UNNAMED = nullcontext()


class Ranges:
    """Ranges without a profile: nothing is named, and no layer or decoding step is called in another way."""

    def __call__(self, *words: object) -> AbstractContextManager[object]:
        """Context manager whose block a profile shows as a range; these words, which only it joins, are the name."""
        return UNNAMED

    def around(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """The call as a range; without a profile the call itself."""
        return call

    def name_layers(self, layers: Sequence[nn.Module]) -> None:
        """Make the forward of each layer a range, "layer 0" and so on, from now on."""

    def recording(self, device: torch.device) -> AbstractContextManager[ProfilerRecording | None]:
        """Context manager that records its block by torch's profiler, if this profile does."""
        return UNNAMED


class NamedRanges(Ranges, ABC):
    """Ranges in a profile. Those of one thread are nested; an exception ends those that it leaves."""

    @abstractmethod
    def push(self, name: str) -> None:
        """Begin a range of this thread."""

    @abstractmethod
    def pop(self) -> None:
        """End this thread's last range."""

    @contextmanager
    def __call__(self, *words: object) -> Iterator[None]:
        self.push(" ".join(map(str, words)))
        try:
            yield
        finally:
            self.pop()

    def around(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call, updated=())
        def named(*args: P.args, **keywords: P.kwargs) -> T:
            with self(name):
                return call(*args, **keywords)

        return named

    def name_layers(self, layers: Sequence[nn.Module]) -> None:
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, name=f"layer {number}": self.push(name))
            layer.register_forward_hook(lambda *_: self.pop(), always_call=True)


class NvtxRanges(NamedRanges):
    """NVTX ranges, for Nsight Systems and other profilers that are started around the program.

    Raises:
        ValueError: this build of PyTorch has no NVTX.
    """

    def __init__(self) -> None:
        if not torch.backends.cuda.is_built():
            raise ValueError(
                f"profile=nvtx needs a PyTorch with CUDA, and {torch.__version__} is without; use profile=torch, "
                "which shows operators of a CPU"
            )

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class TorchRanges(NamedRanges):
    """Ranges of torch's profiler, whose recording goes into the timeline."""

    def __init__(self) -> None:
        self._open = threading.local()

    def push(self, name: str) -> None:
        self._open.ranges = getattr(self._open, "ranges", [])
        self._open.ranges.append(record_function(name))
        self._open.ranges[-1].__enter__()

    def pop(self) -> None:
        self._open.ranges.pop().__exit__(None, None, None)

    def recording(self, device: torch.device) -> AbstractContextManager[ProfilerRecording | None]:
        return recorded(device)


def ranges_for(profile: Profile) -> Ranges:
    """The ranges of a profile. Raises: ValueError, if it needs what this PyTorch lacks."""
    return {Profile.none: Ranges, Profile.nvtx: NvtxRanges, Profile.torch: TorchRanges}[profile]()
