"""Timeline of every rank as spans, and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runahead.timeline.recording import ProfilerRecording

KINDS = ("compute", "wait", "send")
"""Kinds of spans, in the order of their lanes."""

ON_STREAMS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""Categories of what torch's profiler sees on a GPU's streams."""


@dataclass(kw_only=True)
class TraceSpan:
    """Something that a rank did. The spans of all ranks are on one clock.

    Attributes:
        kind: "compute", "wait" or "send".
        layer: None for what belongs to no layer, such as the embedding.
        start_s, end_s: seconds since the prompt's start.
        detail: more in a few words, such as the tokens that were sent.
    """

    kind: str
    layer: int | None
    start_s: float
    end_s: float
    detail: str = ""

    def shifted(self, seconds: float) -> TraceSpan:
        """The same span on a clock that is `seconds` ahead."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


def picture_path(path: str | os.PathLike[str]) -> Path:
    """Path of the picture beside a trace: the same name with .png.

    Raises:
        ValueError: that is the trace's own path.
    """
    picture = Path(path).with_suffix(".png")
    if picture == Path(path):
        raise ValueError(f"timeline={path} is the trace's name, and the picture beside it ends in .png; use .json")
    return picture


def trace_json(
    spans_by_rank: Sequence[Sequence[TraceSpan]],
    *,
    names: Sequence[str] = (),
    ttft_s: float | None = None,
    recordings: Sequence[ProfilerRecording] = (),
) -> str:
    """The spans in the Trace Event Format, for Perfetto: a process per rank, a thread per kind of span.

    Args:
        names: of the ranks; "rank 0" and so on by default.
        recordings: of torch's profiler on every rank, shown below its spans: a thread per stream of the GPU, then one
            per thread of the host.
    """
    events: list[dict[str, Any]] = []
    recorded = [recording.events() for recording in recordings]
    # Viewers drop events before time 0, where the alignment of clocks may put the first microseconds.
    origin_s = min([0.0, *(span.start_s for spans in spans_by_rank for span in spans)])
    origin_s = min([origin_s, *(event["ts"] / 1e6 for of_rank in recorded for event in of_rank)])
    for rank, spans in enumerate(spans_by_rank):
        events.append(_metadata("process_name", rank, 0, name=names[rank] if names else f"rank {rank}"))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        lanes = _lanes(spans)
        for tid, (lane, spans_of_lane) in enumerate(lanes):
            events.append(_metadata("thread_name", rank, tid, name=lane))
            events.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
            for span in spans_of_lane:
                layer = "" if span.layer is None else f"layer {span.layer}"
                events.append(
                    {
                        "ph": "X",
                        "name": " ".join(filter(None, [layer, span.detail])) or span.kind,
                        "cat": span.kind,
                        "pid": rank,
                        "tid": tid,
                        "ts": round((span.start_s - origin_s) * 1e6, 3),
                        "dur": round(max(0.0, span.end_s - span.start_s) * 1e6, 3),
                        "args": {"layer": span.layer, "detail": span.detail},
                    }
                )
        if recorded:
            events += _below(recorded[rank], rank, first_tid=len(lanes), origin_s=origin_s)
    if ttft_s is not None:
        last = max(len(spans_by_rank) - 1, 0)
        time_us = round((ttft_s - origin_s) * 1e6, 3)
        events.append({"ph": "i", "s": "g", "name": "first token", "pid": last, "tid": 0, "ts": time_us})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False) + "\n"


def _below(events: Sequence[dict[str, Any]], rank: int, *, first_tid: int, origin_s: float) -> list[dict[str, Any]]:
    """Events of torch's profiler as events of a rank's process, in threads from number `first_tid` on."""
    streams = {(event["pid"], event["tid"]) for event in events if event.get("cat") in ON_STREAMS}
    threads = {(event["pid"], event["tid"]) for event in events} - streams
    placed = {at: first_tid + number for number, at in enumerate([*sorted(streams), *sorted(threads)])}
    found = []
    for (pid, tid), place in placed.items():
        lane = f"host thread {tid}" + " (main)" * (pid == tid)
        if (pid, tid) in streams:
            lane = f"GPU stream {tid}"
        found.append(_metadata("thread_name", rank, place, name=lane))
        found.append(_metadata("thread_sort_index", rank, place, sort_index=place))
    for event in events:
        moved = {"pid": rank, "tid": placed[event["pid"], event["tid"]], "ts": round(event["ts"] - origin_s * 1e6, 3)}
        if "id" in event:  # of an arrow from a launch to its kernel; other ranks have the same numbers
            moved["id"] = event["id"] + (rank << 32)
        found.append(event | moved)
    return found


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _lanes(spans: Sequence[TraceSpan]) -> list[tuple[str, list[TraceSpan]]]:
    """Group spans by kind into lanes. Spans that overlap others of their kind, as sends do, get additional lanes."""
    lanes: list[tuple[str, list[TraceSpan]]] = []
    for kind in KINDS:
        lanes_of_kind: list[list[TraceSpan]] = [[]]
        for span in sorted((s for s in spans if s.kind == kind), key=lambda s: (s.start_s, s.end_s)):
            free = (lane for lane in lanes_of_kind if not lane or lane[-1].end_s <= span.start_s)
            lane = next(free, None)
            if lane is None:
                lane = []
                lanes_of_kind.append(lane)
            lane.append(span)
        lanes += [(kind if n == 0 else f"{kind} {n + 1}", lane) for n, lane in enumerate(lanes_of_kind)]
    return lanes
