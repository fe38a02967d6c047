"""Draws and tabulates what launch/evaluate.py measured, from its lines alone.

python -m benchmarks.evaluation.plot --lines eval.jsonl [--out docs] [--table]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.evaluation import summary
from benchmarks.evaluation.pictures import PICTURES
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
        found = summary.latest(summary.read(path))
        if not found:
            raise ValueError(f"{path} has no lines; measure some with launch/evaluate.py")
        if options.table:
            rows = summary.rows(found)
            for task, of_task in groupby(rows, key=lambda row: row.task):
                print(f"{task}\n\n{markdown(summary.table(list(of_task)))}")
            for note in summary.notes(rows, path):
                print(note)
            return 0
        folder = path.parent if options.out is None else Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        for picture in draw(found, folder / path.name):
            print(picture)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def picture_path(beside: str | Path, name: str) -> Path:
    """Path of a picture of `PICTURES` beside a report or lines."""
    return Path(f"{os.path.splitext(beside)[0]}_{name}.png")


def draw(found: Sequence[Line], beside: str | Path) -> list[Path]:
    """Write the pictures that there are lines for, each to its `picture_path`.

    Raises: OSError.
    """
    line = found[-1]
    subject = f"{line['model']}, {line['dtype']} on {line['device']}"
    written = []
    for name, picture in PICTURES.items():
        image = picture(summary.rows(found), subject)
        if image is not None:
            path = picture_path(beside, name)
            write_whole(path, image)
            written.append(path)
    return written


if __name__ == "__main__":
    sys.exit(main())
