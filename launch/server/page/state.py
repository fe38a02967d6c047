"""State of the server as JSON, for the page. It has lengths and times, and nothing that prompts or answers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from launch.server.metrics import Metrics
from launch.server.options import ServeRun
from runahead.report import package_version
from runahead.serving.items import Part
from runahead.serving.scheduler import Scheduler
from runahead.serving.state import PrefillState


def setup_json(run: ServeRun) -> dict[str, Any]:
    """Settings of the server that the page shows. They have no paths of files.

    Returns:
        The version; name and numbers of the policy, and the bits of its keys and values; name and ratios of the
        partition, null where the prefill takes none.
    """
    numbers = {name: value for name, value in run.policy.items() if isinstance(value, bool | int | float)}
    partition = {"name": run.partition.name.name, "ratios": run.partition.ratios}
    return {
        "version": package_version("runahead"),
        "policy": {"name": run.policy["name"], "options": numbers, "bits": run.cache.bits},
        "partition": partition if run.prefill.takes_partition else None,
    }


def state_json(scheduler: Scheduler, metrics: Metrics, setup: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's present state as values that JSON supports.

    Args:
        setup: what `setup_json` makes.
    """
    state, limits = scheduler.state(), scheduler.limits
    return {
        **setup,
        "refuses": scheduler.refuses,
        "ranks": state.ranks,
        "device": state.device,
        "prefill": state.prefill,
        "tells_layers": state.tells_layers,
        "limits": {"batch": limits.batch, "max_tokens": limits.max_tokens, "max_waiting": limits.max_waiting},
        "waiting": state.waiting,
        "rows": state.rows,
        "num_tokens": state.num_tokens,
        "step_s": scheduler.estimate.step_s,
        "prompts": {
            "tokens": metrics.counters["prefix_cache_queries_total"],
            "found": metrics.counters["prefix_cache_hits_total"],
        },
        "stored": None
        if state.stored is None
        else {
            "tokens": state.stored.num_tokens,
            "bytes": state.stored.num_bytes,
            "most_bytes": state.stored.most_bytes,
        },
        "prefills": [_running(each) for each in state.prefills],
        "last": None if state.last is None else _ended(state.last),
        "recent": [_rounded(asdict(each)) for each in metrics.recent],
        "prefixes": {} if (part := scheduler.last_part) is None else part.prefix_bytes,
        "memory": [_memory(part) for _, part in sorted(state.parts.items()) if part.report is not None],
    }


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def _running(prefill: PrefillState) -> dict[str, Any]:
    return {
        "number": prefill.number,
        "lengths": prefill.lengths,
        "is_short": prefill.is_short,
        "elapsed_s": round(prefill.elapsed_s, 3),
        "predicted_s": round(prefill.predicted_s, 3),
        "progress": [
            {"rank": rank, "layers": each.layers, "of": each.of} for rank, each in sorted(prefill.progress.items())
        ],
        "done": sorted(prefill.parts),
    }


def _ended(prefill: PrefillState) -> dict[str, Any]:
    """A prefill that has ended. Times of its spans count from the first moment of any rank's part."""
    parts = [part for _, part in sorted(prefill.parts.items())]
    origin_s = min((span.start_s for part in parts for span in part.spans), default=0.0)
    return {
        "number": prefill.number,
        "lengths": prefill.lengths,
        "elapsed_s": round(prefill.elapsed_s, 3),
        "predicted_s": round(prefill.predicted_s, 3),
        "parts": [
            {
                "rank": part.rank,
                "tokens": 0 if part.report is None else part.report.chunk_tokens,
                "prefill_s": round(part.prefill_s, 3),
                "wait_s": round(part.wait_s, 3),
                "spans": [
                    [span.kind, span.layer, round(span.start_s - origin_s, 4), round(span.end_s - origin_s, 4)]
                    for span in part.spans
                ],
            }
            for part in parts
        ],
    }


def _memory(part: Part) -> dict[str, Any]:
    """Bytes of a rank; null where they are not known."""
    assert part.report is not None
    process = part.report.memory
    return {
        "rank": part.rank,
        "weights": None if process is None else process.weights_bytes,
        "peak": None if process is None else process.peak_bytes,
        "prefill_kv": part.report.kv_peak_bytes,
        "live_kv": part.live_bytes,
        "host_kv": part.report.kv_host_bytes,
    }
