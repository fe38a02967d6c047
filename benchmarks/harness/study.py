"""The harness of a study, which declares its variants, one measure of a variant, a table and pictures.

A module of benchmarks/studies/ has its question in the docstring and a `Study`. `Study.main` does the rest: options,
one JSON line after the other, table and pictures from the lines alone.

    python -m benchmarks.studies.<name> [its options] [--lines FILE] [--out FOLDER] [--draw-only]
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import RESULTS, ROOT
from benchmarks.harness.pages import with_part
from runahead.failures import cut_short
from runahead.files import ensure_writable, write_whole

T = TypeVar("T")
S = TypeVar("S")

BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
"""Marks on a page between which a study writes its table."""
PAGES = ROOT / "docs" / "studies"
"""Pages and pictures of studies."""

Variant = dict[str, Any]
"""Variant of a study: one thing that is measured, by the names that its lines have for it."""


def nothing(options: Namespace) -> AbstractContextManager[Any]:
    """Prepare nothing."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Study(Generic[S]):
    """A question, what is measured to answer it, and the table and pictures made from the lines.

    Attributes:
        name: name of the module in benchmarks/studies/, such as commits; its lines are in
            benchmarks/results/commits.jsonl.
        text: the module's docstring, which --help shows.
        has: a field that every line has.
        options: keyword arguments of `add_argument`, as `option` makes them, by the option's name.
        variants: what is measured under the given options, in order. Raises ValueError for a user's mistake.
        prepare: what all variants are measured with, such as a model, open until the last one is measured. Raises
            ValueError for a user's mistake.
        measure: lines of one variant, each appended at once: a function of the options, what is prepared, and the
            variant. Every line also gets the date, the commit, the code, the hardware and the versions.
        table: text to print, such as a `Table`.
        pictures: functions by file name, such as `Curves`; one may return None where there are no lines for it.
        page: page of `--out` in which the table stands between the marks BEGIN and END.
        verdict: of the lines and the parsed command line, the words with which the program fails after its table; None
            if the lines are fine.
    """

    name: str
    text: str | None
    has: str
    measure: Callable[[Namespace, S, Variant], Iterable[Line]]
    table: Callable[[list[Line]], str]
    variants: Callable[[Namespace], Iterable[Variant]] = lambda options: [{}]
    prepare: Callable[[Namespace], AbstractContextManager[S]] = nothing
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: Mapping[str, Callable[[list[Line]], bytes | None]] = field(default_factory=dict)
    page: str = ""
    verdict: Callable[[list[Line], Namespace], str | None] = lambda found, options: None

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
            self._read(options.lines)
        if not options.draw_only:
            self._measure(options)
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
        default = str(RESULTS / f"{self.name}.jsonl")
        parser.add_argument("--lines", default=default, metavar="FILE", help="JSON lines, read and appended to")
        parser.add_argument("--out", default=str(PAGES), metavar="FOLDER", help="folder of its pictures and page")
        parser.add_argument(
            "--dirty", action="store_true", help="measure for benchmarks/results with uncommitted changes"
        )
        parser.add_argument("--draw-only", action="store_true", help="draw and print from the lines; measure nothing")
        return parser

    def _read(self, path: str) -> list[Line]:
        return lines.read(path, option="--lines", kind=self.has)

    def _measure(self, options: Namespace) -> None:
        shared = machine.about()
        with ExitStack() as undo:
            with errors_in_one_line():
                variants = list(self.variants(options))
                prepared = undo.enter_context(self.prepare(options))
            for variant in variants:
                # An evaluation's lines have a digest of code of their own, on which their keys depend.
                for line in self.measure(options, prepared, variant):
                    with errors_in_one_line():
                        lines.append(options.lines, [{**shared, **line}])


def in_turn(
    turns: Mapping[str, Callable[[int], T]], rounds: int, *, warmup: int = 0, label: str = ""
) -> dict[str, list[T]]:
    """Call each of `turns` with the round number, in an order that turns round with every round (A B, B A, A B, ...).

    A drift of the machine's speed then affects all alike. Results of the first `warmup` rounds are dropped.

    Args:
        label: of the progress bar.
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    order = [(number, name) for number in range(warmup + rounds) for name in list(turns)[:: -1 if number % 2 else 1]]
    for number, name in tqdm(order, desc=label or None, unit="turn", disable=None):
        result = turns[name](number)
        if number >= warmup:
            results[name].append(result)
    return results


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


def newest(*names: str) -> Callable[[Iterable[Line]], list[Line]]:
    """Choose the last line for each combination of these fields, in the order in which combinations first appear."""
    return lambda found: list({tuple(line[name] for name in names): line for line in found}.values())


def last_run(found: Sequence[Line]) -> list[Line]:
    """The lines of the run that wrote the last one."""
    return [line for line in found if line.get("date") == found[-1].get("date")]


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with one line for a user's mistake in this block."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SystemExit(cut_short(str(error))) from error
