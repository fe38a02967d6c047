"""The table of what was fuzzed, and the findings, in docs/studies/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pages import with_part
from tests.fuzz.findings import FINDINGS
from tests.fuzz.targets import TARGETS

BEGIN, END = "<!-- fuzzing: begin -->", "<!-- fuzzing: end -->"


def with_table(page: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table between its two marks; as it is where it has none."""
    return with_part(page, BEGIN, table(lines), END)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row per target and one for all, then what was found and is put right."""
    rows = [
        "| what is read | inputs | taken, and usable | refused in one line | anything else | slowest, s |",
        "|---|---|---|---|---|---|",
    ]
    rows += [row(name, [line for line in lines if line["target"] == name]) for name in TARGETS]
    rows += [row("all", lines), "", "Found while the targets were written or fuzzed, put right, and kept as tests:", ""]
    rows += [f"- {finding.target}: {finding.what}" for finding in FINDINGS]
    return "\n".join(rows)


def row(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    inputs, accepted, refused, wrong = (
        sum(line[field] for line in lines) for field in ("inputs", "accepted", "refused", "wrong")
    )
    slowest = max((line["slowest_s"] for line in lines), default=0.0)
    return f"| {name} | {inputs:,} | {accepted:,} | {refused:,} | {wrong:,} | {slowest:.2f} |"
