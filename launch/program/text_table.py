"""A table in aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Container, Sequence


def text_table(rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> str:
    """Align the columns of `rows`, the first of which holds the headings.

    Args:
        left: columns that are aligned on the left; the others are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'<' if n in left else '>'}{widths[n]}}" for n, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
