"""The harness of a study: options, resuming, JSON lines, tables and pictures.

A module of benchmarks/studies/, or of a folder in it, has its question in the docstring, a generator that measures, and
a table and pictures made from the measured lines alone. `Study.main` does the rest, the same for all:

    python -m benchmarks.studies.<name> [its options] [--lines FILE] [--out FOLDER] [--draw-only]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import RESULTS, ROOT
from benchmarks.harness.pages import with_part
from runahead.files import ensure_writable, write_whole

T = TypeVar("T")

BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
"""Marks on a page between which a study writes its table."""
PAGES = ROOT / "docs" / "studies"
"""Pages and pictures of studies."""


@dataclass(frozen=True)
class Run:
    """One run of a study, as passed to its generator.

    Attributes:
        options: the parsed command line.
        shared: date, commit, code, hardware and versions, which the harness adds to every line.
        key: fields that identify a measurement.
        done: keys of the lines already in the file.
    """

    options: argparse.Namespace
    shared: Line
    key: tuple[str, ...]
    done: set[tuple[str, ...]]

    def has(self, about: Mapping[str, Any]) -> bool:
        """Whether the file has a line with these values of the key's fields."""
        return bool(self.key) and key_of({**self.shared, **about}, self.key) in self.done

    def bar(self, items: Collection[T], unit: str) -> Iterator[T]:
        """Iterate over the items, with a progress bar on a terminal."""
        yield from tqdm(items, unit=unit, disable=None if is_first_rank() else True)

    def in_turn(self, turns: Mapping[str, Callable[[int], T]], rounds: int, *, warmup: int = 0) -> dict[str, list[T]]:
        """Call each of `turns` with the round number, round after round (A B C A B C ...).

        A drift of the machine's speed then affects all alike. Results of the first `warmup` rounds are dropped.
        """
        results: dict[str, list[T]] = {name: [] for name in turns}
        for number, name in self.bar([(number, name) for number in range(warmup + rounds) for name in turns], "turn"):
            result = turns[name](number)
            if number >= warmup:
                results[name].append(result)
        return results


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, the generator that measures it, and the table and pictures made from its lines.

    Attributes:
        name: name of the module in benchmarks/studies/, such as ranks.prediction; its lines are in
            benchmarks/results/prediction.jsonl.
        text: the module's docstring, which --help shows.
        has: a field that every line has.
        options: keyword arguments of `add_argument`, as `option` makes them, by the option's name.
        measure: generator of lines, each appended at once; runs on all ranks where torchrun starts several.
        table: text to print.
        pictures: functions by file name; one may return None where there are no lines for it.
        key: fields that identify a measurement. `measure` can skip those in the file by `Run.has`.
        page: page of `--out` in which the table stands between the marks BEGIN and END.
        manual: page beside `--out`, of the manual, and what stands there between these marks: a part of the table.
        replaces: write all lines at the end, in place of those in the file and with nothing of the machine but the
            commit, for simulations.
        verdict: of the lines and the parsed command line, the words with which the program fails after its table; None
            if the lines are fine.
    """

    name: str
    text: str | None
    has: str
    measure: Callable[[Run], Iterator[Line]]
    table: Callable[[list[Line]], str]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[list[Line]], bytes | None]] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    page: str = ""
    manual: tuple[str, Callable[[list[Line]], str]] | None = None
    replaces: bool = False
    verdict: Callable[[list[Line], argparse.Namespace], str | None] = lambda found, options: None

    def main(self, args: Sequence[str] | None = None) -> None:
        """Measure, unless --draw-only is given, then draw the pictures and print the table.

        Raises:
            SystemExit: with one line for a wrong command line, an unreadable file of lines, a full disk, a checkout
                with uncommitted changes for lines of the repository, or what `verdict` says.
        """
        options = self.parser().parse_args(args)
        with errors_in_one_line():
            if not Path(options.out).is_dir():
                raise ValueError(f"--out {options.out} is not a folder; create it first")
            if not options.draw_only:
                ensure_writable(options.lines, option="--lines")
                if not options.dirty:
                    machine.require_known_code(options.lines, remedy="--dirty or other --lines")
            found = self._read(options.lines)
        if not options.draw_only:
            self._measure(options, found)
        if not is_first_rank():
            return
        with errors_in_one_line():
            found = self._read(options.lines)
            if not found:
                raise ValueError(f"{options.lines} has no lines yet; leave out --draw-only")
            for name, picture in self.pictures.items():
                image = picture(found)
                if image is not None:
                    write_whole(Path(options.out) / name, image)
        table = self.table(found).rstrip()
        if self.page:
            write_part(Path(options.out) / self.page, table)
        if self.manual:
            name, part = self.manual
            write_part(Path(options.out).parent / name, part(found).rstrip())
        print(table)
        if (wrong := self.verdict(found, options)) is not None:
            raise SystemExit(wrong)

    def parser(self) -> argparse.ArgumentParser:
        """Parser of the study's own options and those of all studies."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.studies.{self.name}",
            description=self.text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, about in self.options.items():
            parser.add_argument(f"--{name}", **about)
        default = RESULTS / f"{self.name.rpartition('.')[2]}.jsonl"
        parser.add_argument("--lines", default=str(default), metavar="FILE", help="JSON lines, read and appended to")
        parser.add_argument("--out", default=str(PAGES), metavar="FOLDER", help="folder of its pictures and page")
        parser.add_argument(
            "--dirty", action="store_true", help="measure for benchmarks/results with uncommitted changes"
        )
        parser.add_argument("--draw-only", action="store_true", help="draw and print from the lines; measure nothing")
        return parser

    def _read(self, path: str) -> list[Line]:
        return lines.read(path, option="--lines", kind=self.has)

    def _measure(self, options: argparse.Namespace, found: list[Line]) -> None:
        shared = {"commit": machine.commit()} if self.replaces else machine.about()
        run = Run(options, shared, self.key, {key_of(x, self.key) for x in found})
        made = []
        for line in self.measure(run):
            # An evaluation's lines have a digest of code of their own, on which their keys depend.
            made.append({**run.shared, **line})
            if is_first_rank() and not self.replaces:
                with errors_in_one_line():
                    lines.append(options.lines, made[-1:])
        if self.replaces:
            with errors_in_one_line():
                write_whole(options.lines, lines.dumps(made))


def option(default: Any, help: str | None = None, **more: Any) -> dict[str, Any]:
    """Keyword arguments of `add_argument`: the default's type, several values for a list, a switch for False."""
    if default is False:
        return {"action": "store_true", "help": help, **more}
    several = isinstance(default, list)
    example = default[0] if several else default
    given: dict[str, Any] = {"default": default, "help": help, "type": str if example is None else type(example)}
    return given | ({"nargs": "+"} if several else {}) | more


def write_part(page: Path, table: str) -> None:
    """Write the table between the marks of a page, if that exists."""
    if page.is_file():
        write_whole(page, with_part(page.read_text(encoding="utf-8"), BEGIN, f"\n{table}\n", END))


def newest(found: Sequence[Line], *names: str) -> dict[tuple[Any, ...], Line]:
    """The last line for each combination of these fields, in the order in which combinations first appear."""
    return {tuple(line[name] for name in names): line for line in found}


def last_run(found: Sequence[Line]) -> list[Line]:
    """The lines of the run that wrote the last one."""
    return [line for line in found if line.get("date") == found[-1].get("date")]


def key_of(line: Line, names: Sequence[str]) -> tuple[str, ...]:
    """Values of these fields as text; a line of an earlier version may lack some."""
    return tuple(str(line.get(name)) for name in names)


def is_first_rank() -> bool:
    """Whether this process writes and prints: rank 0 under torchrun, or a process started alone."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with one line for a user's mistake in this block."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
