"""Fault report of a rank that had to end, as JSON: its wait, its transfers, the ranks' heartbeats and thread stacks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runahead.files import write_whole
from runahead.ranks.ranks import Ranks
from runahead.ranks.worker import Worker

DUMP_S = 2.0
"""Seconds to wait for the dump of NCCL's flight recorder, which may need a lock that is never released."""


def fault_path(pattern: str | os.PathLike[str], rank: int) -> Path:
    """Path of one rank's fault report: `run.json` becomes `run.rank1.fault.json`."""
    path = Path(pattern)
    return path.with_name(f"{path.stem}.rank{rank}.fault.json")


def write_fault_report(path: Path, ranks: Ranks, reason: str) -> None:
    """Write this rank's fault report to `path`, and with NCCL the dump of its flight recorder beside it.

    Raises:
        OSError: a file cannot be written.
    """
    report = fault_report(ranks, reason)
    if ranks.backend == "nccl" and (dump := flight_recorder()) is not None:
        beside = path.with_suffix(".nccl.json")
        write_whole(beside, dump)
        report["nccl_flight_recorder"] = beside.name
    write_whole(path, json.dumps(report, indent=1) + "\n")


def fault_report(ranks: Ranks, reason: str) -> dict[str, Any]:
    """The fault report as a dictionary for JSON. Times are seconds ago; bytes are those of KV messages."""
    now_s, wait = time.monotonic(), ranks.waiting_for
    transfers = [record.as_json(now_s) for record in ranks.records.all()]
    place = {"stage": ranks.stage, "share": ranks.share} if ranks.num_shares > 1 else {}
    return {
        "reason": reason,
        "rank": ranks.rank,
        **place,
        "world_size": ranks.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "timeout_s": ranks.timeout_s,
        "backend": ranks.backend,
        "waiting_for": None
        if wait is None
        else {"what": wait.describe(), "ranks": wait.peers, "since_s": round(now_s - wait.began_s, 3)},
        "ranks": [
            {"rank": each.rank, "host": each.host, "pid": each.pid, "last_beat": beat}
            for each, beat in zip(ranks.present, ranks.beats, strict=False)
        ],
        "outstanding": [transfer for transfer in transfers if transfer["done_s_ago"] is None],
        "done": [transfer for transfer in transfers if transfer["done_s_ago"] is not None],
        "threads": _stacks(),
    }


def flight_recorder() -> bytes | None:
    """NCCL's record of its last operations, as JSON; None if it keeps none or does not answer in `DUMP_S`."""
    from torch._C import _distributed_c10d

    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return None
    job = Worker("flight recorder").submit(dump)
    return job.result if job.done.wait(DUMP_S) and job.error is None else None


def _stacks() -> dict[str, list[str]]:
    """Call stack of each Python thread, innermost call last, with the last two parts of each path only."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [
            f"{'/'.join(Path(call.filename).parts[-2:])}:{call.lineno} {call.name}"
            for call in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
