"""Tables for terminals and in Markdown: rows of cells, starting with the head."""

from __future__ import annotations

from collections.abc import Sequence

Rows = list[tuple[str, ...]]


def text(table: Rows) -> str:
    """Format aligned columns: the first one left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "".join(f"{line}\n" for line in lines)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first column left-aligned, the others right-aligned."""
    head, *body = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mebibytes(count: float | None) -> str:
    """Format a number of bytes in MiB; "-" for None."""
    return "-" if count is None else f"{count / 2**20:,.2f} MiB"
