"""Tables in Markdown and their cells; launch/program/text_table.py formats the same rows for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

Rows = list[tuple[str, ...]]


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, whose first row holds the headings; all columns but the first are right-aligned."""
    rule = "| --- |" + " ---: |" * (len(table[0]) - 1)
    head, *body = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([head, rule, *body, ""])


def mebibytes(count: float | None) -> str:
    """Format a number of bytes in MiB; "-" for None."""
    return "-" if count is None else f"{count / 2**20:,.2f} MiB"
