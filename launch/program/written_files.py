"""Check of the files that a run writes: they can be written, and none is a file that it reads or another of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from runahead.files import ensure_writable

WRITTEN = (
    *("answers", "report", "timeline", "ranks.fault_report", "out", "table", "picture"),
    *("lines", "bench.results"),
)
"""Options of all programs that name a file to write, or a folder of such files."""

SHARED = ("lines", "bench.results", "bench.compute")
"""Options that name a file of several runs, which each reads or appends to."""

READ = (
    *("file", "ids_file", "chat_template", "path", "config", "model", "table", "sample", "samples"),
    *("squad", "hotpotqa", "schema", "heads", "predictor", "skew"),
)
"""Last names of the options whose text is a file to read, in whatever section, policy or task they are."""


def ensure_outputs(options: Any, written: Mapping[str, Sequence[str | os.PathLike[str] | None]]) -> None:
    """Check, before any work, the files that a run writes. No file is created or changed.

    Args:
        options: all options of the run, a dataclass.
        written: by option, the path that it gives and those of the files that are written beside it. None is left out,
            and so is what is no file, such as a device. An option here may read its file too, to go on from it.

    Raises:
        ValueError: one cannot be written, two are the same file, or one is a file that another option reads.
    """
    assert set(written) <= {*WRITTEN, *SHARED}, f"a sweep does not know that these are written: {list(written)}"
    taken: dict[object, tuple[str, str, str]] = {}
    for option, paths in written.items():
        for path in paths:
            if path is None:
                continue
            ensure_writable(path, option=option)
            given = f"{option}={paths[0]}"
            place = _place(path)
            if place in taken:
                raise ValueError(f"{taken[place][1]} and {given} would overwrite each other; rename one")
            if place is not None:
                told = given if path is paths[0] else f"{path}, which {given} writes beside it,"
                taken[place] = option, given, told
    for option, path in _texts("", options):
        if option not in written and option.rpartition(".")[2] in READ and path != "-" and _place(path) in taken:
            writer, _, told = taken[_place(path)]
            raise ValueError(
                f"{told} would overwrite {option}={path}, which this run reads; give another file with {writer}="
            )


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Full name and value of every text among options; texts of a list have its name."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(name, each)
    else:
        if is_dataclass(value):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        for key, each in value.items() if isinstance(value, dict) else ():
            yield from _texts(f"{name}.{key}" if name else str(key), each)


def _place(path: str | os.PathLike[str]) -> object:
    """Key that all names of a file have in common; None for what is no file, such as a device or a folder."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a name that no file can have
        return None
    return (about.st_dev, about.st_ino) if stat.S_ISREG(about.st_mode) else None
