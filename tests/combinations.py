"""The table of combinations that are refused, for docs/combinations.md: `python -m tests.combinations` writes it."""

from __future__ import annotations

from pathlib import Path

from runahead.features.refused import others_by_first

PAGE = "docs/combinations.md"
BEGIN, END = "<!-- table: python -m tests.combinations -->\n", "<!-- end of the table -->\n"


def table() -> str:
    """The table as Markdown: a line per first fact, with what else the rows name."""
    rows = [f"|{first}|{'; '.join(others)}|\n" for first, others in others_by_first().items()]
    return "".join(["|this|not with|\n", "|---|---|\n", *rows])


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / PAGE
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
