"""The tables of combinations for docs/combinations.md: `python -m tests.combinations` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runahead.features.combination import others_by_first
from runahead.features.refused import REFUSED
from runahead.features.slower import SLOWER, Way

PAGE = "docs/combinations.md"
BEGIN, END = "<!-- table: python -m tests.combinations -->\n", "<!-- end of the table -->\n"
RULE = "|---|---|\n"


def table() -> str:
    """Both tables as Markdown: a line per first fact of what is refused, and a line per faster way."""
    refused = _lines(others_by_first(REFUSED))
    slower = _lines({way.value: _facts_of(way) for way in Way})
    return "".join(["|this|not with|\n", RULE, *refused, "\n|slower|with|\n", RULE, *slower])


def _facts_of(way: Way) -> list[str]:
    """The facts with which a way is not taken; what all of its rows name comes once, in front."""
    rows = [row.facts for row in SLOWER if row.way is way]
    shared = [fact for fact in rows[0] if len(rows) > 1 and all(fact in facts for facts in rows)]
    first, *others = (" with ".join(fact for fact in facts if fact not in shared) for facts in rows)
    return [": ".join([*shared, first]), *others]


def _lines(rows: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"|{first}|{'; '.join(others)}|\n" for first, others in rows.items()]


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / PAGE
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
