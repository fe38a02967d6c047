"""`python -m partitioner.show <table.json> [out=<folder>]`: prints a lookup table and draws its pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from launch.program.text_table import text_table
from partitioner.searches.record import SearchRecord
from partitioner.table.entry import TableEntry
from partitioner.table.fingerprint import link_text
from partitioner.table.lookup_table import WORTHWHILE, LookupTable
from runahead.picture_style import seconds

HELP = """\
usage: python -m partitioner.show <table.json> [out=<folder>]

Prints a lookup table that python -m partitioner.search wrote, and draws its pictures (PNG) beside it, or in the folder.
"""

COLUMNS = ("", "tokens", "ranks", "TTFT", "speed-up", "ratios", "found by")
NOTE = f"* the best number of ranks: twice as many have to bring the first token at least {WORTHWHILE:.0%} earlier"
DOUBTFUL = "! more than the ranks can bring: other work slowed a measurement down; search again, with another table="
LEFT = ("ratios", "found by")


def main(args: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit status: 0 for success, 2 for a mistake in table or command line."""
    arguments = list(sys.argv[1:] if args is None else args)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP, end="")
        return 0
    try:
        table_path, folder = _read(arguments)
        table = LookupTable.load(table_path)
        print(table_text(table), end="")
        from partitioner.pictures.table import save_pictures  # not sooner, since it loads matplotlib

        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        written = save_pictures(table, SearchRecord.beside(table_path), table_path, folder=folder)
    except OSError as error:
        print(f"pictures cannot be written: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def _read(arguments: Sequence[str]) -> tuple[Path, Path | None]:
    tables = [argument for argument in arguments if not argument.startswith(("-", "out="))]
    folders = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    unknown = [argument for argument in arguments if argument.startswith("-")]
    if unknown:
        raise ValueError(f"unknown flag {unknown[0]}; usage: python -m partitioner.show <table.json> [out=<folder>]")
    if len(tables) != 1:
        raise ValueError(f"one table is needed, not {len(tables)}: python -m partitioner.show <table.json>")
    if "" in folders:
        raise ValueError("out= is empty; name a folder, or leave it out")
    return Path(tables[0]), Path(folders[-1]) if folders else None


def table_text(table: LookupTable) -> str:
    """The table as text for a terminal, with the best number of ranks of every length marked."""
    if not table.entries:
        return f"{_head(table)}\nno entries\n"
    rows = [list(COLUMNS)]
    groups = groupby(table.entries, key=lambda entry: entry.length)
    for (_, group), best in zip(groups, table.best_entries(), strict=True):
        rows += _rows(list(group), best)
    left = [column for column, name in enumerate(COLUMNS) if name in LEFT]
    notes = [NOTE, *([DOUBTFUL] if any(row[COLUMNS.index("speed-up")].endswith("!") for row in rows) else [])]
    return "\n".join([_head(table), "", text_table(rows, left=left), *notes, ""])


def _rows(entries: Sequence[TableEntry], best: TableEntry) -> list[list[str]]:
    """Rows of one prompt length, which only the first row shows."""
    alone = next((entry.ttft_s for entry in entries if entry.ranks == 1), None)
    return [
        [
            "*" if entry is best else "",
            f"{entry.length:,}" if entry is entries[0] else "",
            str(entry.ranks),
            seconds(entry.ttft_s, aligned=True),
            "" if alone is None else _speed_up(alone / entry.ttft_s, entry.ranks),
            " ".join(f"{ratio:.3f}" for ratio in entry.ratios),
            entry.objective + ("" if entry.spread is None else f", spread {entry.spread:.1%}"),
        ]
        for entry in entries
    ]


def _speed_up(factor: float, ranks: int) -> str:
    """A speed-up over one rank, marked where it is beyond the bound, TTFT(1) / p, by more than ranks are chosen for."""
    return f"{factor:.2f}x" + ("!" if factor > ranks * (1 + WORTHWHILE) else "")


def _head(table: LookupTable) -> str:
    about = table.fingerprint
    link = "unknown"
    if about.link is not None:
        link = f"{link_text(about.link)} ({'measured' if about.link_measured else 'given'})"
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items() if version is not None)
    lines = {
        "model": f"{about.name + ': ' if about.name else ''}{about.model}",
        "on": f"{about.place}, {about.dtype}",
        "KV by": f"{about.backend}, {about.transfer}; link {link}",
        "made": ", ".join(part for part in (about.date, versions) if part) or "at an unknown time",
    }
    return "\n".join(f"{name:8}{text}" for name, text in lines.items())


if __name__ == "__main__":
    sys.exit(main())
