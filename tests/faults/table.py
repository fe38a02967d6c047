"""The table of outcomes in docs/studies/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.pages import with_part
from tests.faults.drills import KINDS

BEGIN, END = "<!-- drills: begin -->", "<!-- drills: end -->"


def with_table(page: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table between its two marks; as it is where it has none."""
    return with_part(page, BEGIN, table(lines), END)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row per kind of fault, and one for all."""
    rows = [
        "| fault | drills | as expected | seconds until all ranks were gone: median, longest |",
        "|---|---|---|---|",
    ]
    rows += [row(kind, [line for line in lines if line["drill"]["kind"] == kind]) for kind in KINDS]
    rows.append(row("all", lines))
    wrong = [line for line in lines if line["problems"]]
    rows += [""] * bool(wrong)
    rows += [f"- drill {line['number']} ({line['drill']['kind']}): {'; '.join(line['problems'])}" for line in wrong]
    return "\n".join(rows)


def row(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    skipped = sum(line["skipped"] is not None for line in lines)
    good = sum(line["as_expected"] for line in lines)
    seconds = [line["gone_s"] for line in lines if line["gone_s"] is not None]
    gone = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
    return f"| {name} | {len(lines)} | {good}{f' ({skipped} not possible there)' * bool(skipped)} | {gone} |"
