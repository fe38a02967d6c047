"""torch's names for a GPU, as they are while the virtual GPU is there.

Streams and events order no kernels: an operation is done when it returns. Copies of the driver, counters, messages and
events come later where their stream waits for something (driver.py). A test that needs the order of kernels uses the
virtual accelerator (tests/virtual/device.py), where they run later.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.virtual.cuda import graphs
from tests.virtual.cuda.captures import refuse_in_capture
from tests.virtual.cuda.counts import get_sync_debug_mode, note_wait, set_sync_debug_mode
from tests.virtual.cuda.device import GPU
from tests.virtual.cuda.driver import DRIVER, Happening
from tests.virtual.cuda.generators import GENERATOR
from tests.virtual.cuda.memory import DEVICE, HOST, TOTAL_BYTES


class Stream(torch.cuda.Stream):
    """Stands for torch.cuda.Stream, of which it is one for `isinstance`, without torch's set-up."""

    _numbers = itertools.count()

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        return object.__new__(cls)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.priority, self.cuda_stream = GPU, priority, next(self._numbers)

    def wait_stream(self, stream: torch.cuda.Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: torch.cuda.Event) -> None:
        assert isinstance(event, Event)
        self.wait_for(event.recorded)

    def wait_for(self, happening: Happening) -> None:
        """Let what this stream is told from now on come after something."""
        DRIVER.queue(self.cuda_stream, lambda: None, [(happening, 0)])

    def record_event(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")
        event = Event()
        event.record(self)
        event.recorded.wait(0, None)

    def query(self) -> bool:
        refuse_in_capture()
        return self.record_event().query()

    def __enter__(self) -> Stream:
        self._before = _current.stream
        _current.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _current.stream = self._before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def __repr__(self) -> str:
        return f"<Stream {self.cuda_stream} of the virtual GPU>"


class Event(torch.cuda.Event):
    """Stands for torch.cuda.Event, likewise."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return object.__new__(cls)

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._is_timed, self._time_s = enable_timing, 0.0
        self.recorded = Happening()
        self.recorded.set()

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        self.recorded = recorded = Happening()

        def happen() -> None:
            self._time_s = time.perf_counter()
            recorded.set()

        DRIVER.queue((stream or current_stream()).cuda_stream, happen)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        refuse_in_capture()
        return self.recorded.reached(0)

    def synchronize(self) -> None:
        note_wait("Event.synchronize", is_told=False)
        self.recorded.wait(0, None)

    def elapsed_time(self, end_event: torch.cuda.Event) -> float:
        assert isinstance(end_event, Event)
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end_event._time_s - self._time_s) * 1e3

    def __repr__(self) -> str:
        return "<Event of the virtual GPU>"


DEFAULT_STREAM = Stream()


class _Current(threading.local):
    """The stream of each thread."""

    stream = DEFAULT_STREAM


_current = _Current()


def current_stream(device: object = None) -> Stream:
    """Stands for torch.cuda.current_stream."""
    return _current.stream


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    before = _current.stream
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


@contextmanager
def _on_device(device: object) -> Iterator[None]:
    _require_device(device)
    yield


def _require_device(device: object) -> None:
    """Raises: RuntimeError, for another than the only GPU."""
    index = device if isinstance(device, int) else torch.device(str(device)).index
    if index not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")


PROPERTIES = SimpleNamespace(
    name="virtual GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=TOTAL_BYTES,
    uuid=f"virtual-{os.getpid()}",
)


def _synchronize(device: object = None) -> None:
    note_wait("synchronize", is_told=False)
    DRIVER.drain()


def _reset_peak(device: object = None) -> None:
    DEVICE.peak_bytes = DEVICE.allocated_bytes


def _seed(seed: int) -> None:
    GENERATOR.manual_seed(seed)


CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _require_device,
    "device": _on_device,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "Stream": Stream,
    "Event": Event,
    "stream": _on_stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT_STREAM,
    "synchronize": _synchronize,
    "get_sync_debug_mode": get_sync_debug_mode,
    "set_sync_debug_mode": set_sync_debug_mode,
    "mem_get_info": lambda device=None: (TOTAL_BYTES - DEVICE.allocated_bytes, TOTAL_BYTES),
    "memory_allocated": lambda device=None: DEVICE.allocated_bytes,
    "memory_reserved": lambda device=None: DEVICE.allocated_bytes,
    "max_memory_allocated": lambda device=None: DEVICE.peak_bytes,
    "reset_peak_memory_stats": _reset_peak,
    "CUDAGraph": graphs.CUDAGraph,
    "MemPool": graphs.MemPool,
    "empty_cache": graphs.ALLOCATOR.free_cached,
    "host_memory_stats": HOST.stats,
    "cudart": lambda: HOST,
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "get_rng_state": lambda device=None: GENERATOR.get_state(),
    "set_rng_state": lambda new_state, device=None: GENERATOR.set_state(new_state),
}
"""Names of torch.cuda."""
