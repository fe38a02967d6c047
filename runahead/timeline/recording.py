"""A recording of one rank by torch's profiler: operators, kernels and named ranges, as events of a trace."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

ANCHOR = "the clock of this rank"
"""Name of ranges whose moment is known on both clocks, the profiler's and this process's."""

LOG_LEVEL = "KINETO_LOG_LEVEL"

NUM_ANCHORS = 7
"""Number of these ranges; the shortest counts, as in Cristian's algorithm (`ControlMessages.clock_offset_s`)."""


@dataclass(kw_only=True)
class ProfilerRecording:
    """Events of torch's profiler on one rank.

    Attributes:
        packed: the events in the Trace Event Format, as compressed JSON, since there may be some 100,000.
        shift_s: seconds to add to their times.
    """

    packed: bytes = b""
    shift_s: float = 0.0

    def shifted(self, seconds: float) -> ProfilerRecording:
        """The same recording on a clock that is `seconds` ahead."""
        return replace(self, shift_s=self.shift_s + seconds)

    def events(self) -> list[dict[str, Any]]:
        """The events, whose times `ts` are microseconds of the clock to which the recording was shifted."""
        events: list[dict[str, Any]] = json.loads(zlib.decompress(self.packed)) if self.packed else []
        for event in events:
            event["ts"] += self.shift_s * 1e6
        return events


@contextmanager
def recorded(device: torch.device) -> Iterator[ProfilerRecording]:
    """Context manager that records all threads of this process, and fills the recording at its end.

    Its times are those of `time.perf_counter`. An exception ends it without a recording.

    Args:
        device: whose kernels are recorded, if it is a GPU.
    """
    wanted = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if device.type == "cuda" else set())
    profiler = profile(
        activities=wanted & supported_activities(),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    recording, anchors = ProfilerRecording(), list[tuple[float, int, float]]()  # (length, number, middle in seconds)
    with _quiet(), profiler:
        for number in range(NUM_ANCHORS):
            before_s = time.perf_counter()
            with record_function(ANCHOR):
                pass
            after_s = time.perf_counter()
            anchors.append((after_s - before_s, number, (before_s + after_s) / 2))
        yield recording
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    _, number, middle_s = min(anchors)
    anchored = sorted(event["ts"] + event["dur"] / 2 for event in events if event["name"] == ANCHOR)
    if device.type == "cuda" and not any(each.get("cat") == "kernel" for each in events):
        warnings.warn(
            "torch's profiler has seen no kernel of the GPU: it may need permission, or another profiler is running; "
            f"{LOG_LEVEL}=0 in the environment lets it tell why",
            stacklevel=3,
        )
    # What the profiler tells of itself belongs to no thread.
    kept = [each for each in events if isinstance(each["pid"], int) and each["ph"] in "Xsft" and each["name"] != ANCHOR]
    recording.packed = zlib.compress(json.dumps(kept).encode(), level=1)
    recording.shift_s = middle_s - anchored[number] / 1e6


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager in which the profiler does not tell of each start and end, unless the environment asks for it."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL]
