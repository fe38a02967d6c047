"""Fault drills: jobs to which something happens, and what becomes of them. Needs root for networks and disks.

    python tests/faults/drill.py --seed 1 --count 200

Appends a JSON line per drill to benchmarks/results/fault_drill.jsonl and goes on there where it was interrupted; then
writes the table of outcomes into docs/studies/reliability.md. `--only 17` runs a drill again and shows what it said.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import lines as json_lines
from benchmarks.harness import machine
from benchmarks.harness.study import errors_in_one_line
from benchmarks.network.interruptions import signals_raise
from runahead.files import write_whole
from tests.faults import models
from tests.faults.drilling import Drilling
from tests.faults.drills import drill
from tests.faults.table import with_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fault_drill.jsonl"
PAGE = ROOT / "docs" / "studies" / "reliability.md"


def main(args: Sequence[str] | None = None) -> int:
    """0 if all drills of this seed were as expected, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int, help="this drill alone, which is not recorded")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dirty", action="store_true", help="run for benchmarks/results with uncommitted changes")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(args)
    if options.only is None and not options.dirty:
        with errors_in_one_line():
            machine.require_known_code(options.results, remedy="--dirty or other --results")
    cache = Path(os.environ.get("RUNAHEAD_CACHE") or "~/.cache/runahead").expanduser()
    model = models.obtain(cache / "drill-model")
    with signals_raise(), tempfile.TemporaryDirectory(prefix="runahead-drill-") as folder:
        drilling = Drilling(model, Path(folder))
        if options.only is not None:
            line = _run(drilling, options.seed, options.only)
            print(json.dumps(line, indent=1))
            stderr = Path(folder) / str(options.only) / "stderr"
            print(stderr.read_text() if stderr.exists() else "", end="", file=sys.stderr)
            return 0 if line["as_expected"] else 1
        known = json_lines.read(options.results, option="--results", kind="drill")
        done = {line["number"] for line in known if line["seed"] == options.seed}
        for number in range(options.count):
            if number not in done:
                line = _run(drilling, options.seed, number)
                json_lines.append(options.results, [line])
                print(_told(line), flush=True)
    ours = [each for each in json_lines.read(options.results, kind="drill") if each["seed"] == options.seed]
    if options.page.exists():
        write_whole(options.page, with_table(options.page.read_text(encoding="utf-8"), ours))
    return 0 if all(line["as_expected"] or line["skipped"] for line in ours) else 1


def _run(drilling: Drilling, seed: int, number: int) -> dict[str, Any]:
    chosen = drill(seed, number)
    outcome = drilling.run(chosen, str(number))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"seed": seed, "number": number, "date": date, "drill": chosen.as_json()} | outcome.as_json()


def _told(line: dict[str, Any]) -> str:
    result = line["skipped"] or ("; ".join(line["problems"]) or "as expected")
    about = line["drill"]
    where = f"{about['file']}" if about["file"] else f"{about['moment']} of rank {about['rank']}/{about['size']}"
    gone = "" if line["gone_s"] is None else f" ({line['gone_s']:.1f} s)"
    return f"{line['number']}: {about['kind']}, {where}, {about['prefill']}: {result}{gone}"


if __name__ == "__main__":
    sys.exit(main())
