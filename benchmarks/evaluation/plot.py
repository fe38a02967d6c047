"""Draws and tabulates what launch/evaluate.py measured, from its lines alone:

python -m benchmarks.evaluation.plot --lines eval.jsonl [--out docs] [--table]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.evaluation import record, summary
from benchmarks.evaluation.pictures import pictures
from benchmarks.evaluation.summary import Row
from benchmarks.harness import lines
from benchmarks.harness.lines import Line
from benchmarks.harness.text_table import markdown
from runahead.files import write_whole


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 success, 1 invalid lines or files, 2 invalid command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", required=True, help="JSON lines of launch/evaluate.py")
    parser.add_argument("--out", help="folder for the pictures; by default that of the lines")
    parser.add_argument("--table", action="store_true", help="print tables in Markdown instead of drawing")
    options = parser.parse_args(args)
    path = Path(options.lines)
    try:
        found = record.latest(read(path))
        if not found:
            raise ValueError(f"{path} has no lines; measure some with launch/evaluate.py")
        if options.table:
            for task, of_task in groupby(summary.rows(found), key=lambda row: row.task):
                print(f"{task}\n\n{markdown(summary.table(list(of_task)))}")
            return 0
        folder = path.parent if options.out is None else Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        for picture in draw(found, folder / path.stem):
            print(picture)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read(path: Path) -> list[Line]:
    """Read all lines of a file. Raises: ValueError: a line is not a measurement of an evaluation."""
    return lines.read(path, option="lines", kind="task", fields=record.FIELDS)


def draw(found: Sequence[Line], stem: Path) -> list[Path]:
    """Write the pictures that there are lines for, as <stem>_<picture>.png.

    Raises: OSError.
    """
    made: list[Row] = summary.rows(found)
    written = []
    for name, image in pictures(made, subject(found)).items():
        path = stem.with_name(f"{stem.name}_{name}.png")
        write_whole(path, image)
        written.append(path)
    return written


def subject(found: Sequence[Line]) -> str:
    """Subtitle of the pictures: model, dtype and device."""
    line = found[-1]
    return f"{line['model']}, {line['dtype']} on {line['device']}"


if __name__ == "__main__":
    sys.exit(main())
