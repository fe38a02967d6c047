"""Draws and tabulates what launch/bench.py measured, from its lines alone.

python -m benchmarks.ttft.plot [--results benchmarks/results/bench.jsonl] [--out docs/studies] [--table]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ttft.comparison import Comparison, comparisons, read
from benchmarks.ttft.pictures import PICTURES
from benchmarks.ttft.tables import document
from runahead.files import write_whole


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 success, 1 invalid lines or files, 2 invalid command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--results", default="benchmarks/results/bench.jsonl", help="JSON lines of launch/bench.py")
    parser.add_argument("--out", default="docs/studies", help="folder for the pictures")
    parser.add_argument("--table", action="store_true", help="print tables in Markdown instead of drawing")
    parser.add_argument("--commit", help="only lines of this commit")
    parser.add_argument("--model", help="only lines of this model, by its name")
    options = parser.parse_args(args)
    try:
        compared = chosen(options.results, options.commit, options.model)
        if options.table:
            print(document(compared), end="")
            return 0
        largest = max(compared, key=lambda each: sum(map(len, each.points.values())))
        if len(compared) > 1:
            print(f"{len(compared)} sets of lines that do not compare; drawn: {largest.subject()}", file=sys.stderr)
        for path in draw(largest, Path(options.out)):
            print(path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the pictures that there are lines for.

    Raises: OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in PICTURES.items():
        image = picture(comparison)
        if image is not None:
            write_whole(folder / name, image)
            written.append(folder / name)
    return written


def chosen(path: str, commit: str | None, model: str | None) -> list[Comparison]:
    """Comparisons of a commit and a model, or of any where None. Raises: ValueError: no such lines."""
    found = [line for line in read(path) if commit in (None, line["commit"]) and model in (None, line["model"]["name"])]
    if not found:
        wanted = "".join(f" of {name} {value}" for name, value in (("commit", commit), ("model", model)) if value)
        raise ValueError(f"{path} has no lines{wanted}; measure some with launch/bench.py")
    return comparisons(found)


if __name__ == "__main__":
    sys.exit(main())
