"""Measurements as JSON lines: read and check a file of them, and append to it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from launch.program.ending import say
from runahead.files import read_user_file

Line = dict[str, Any]


def read(
    path: str | os.PathLike[str],
    *,
    option: str = "bench.results",
    kind: str = "variant",
    fields: Mapping[str, Any] | None = None,
) -> list[Line]:
    """Read all lines of a file; none if it does not exist, or is a device or a pipe, which is only written to.

    Args:
        option: the file's option on the command line, for messages.
        kind: a field that every line has.
        fields: further fields of every line and their forms, as in `fits`.

    Raises: ValueError: a line is not a JSON object with these fields; the message names the file and the line.
    """
    name = f"{option}={os.fspath(path)}"
    try:
        content = read_user_file(path).decode("utf-8") if Path(path).is_file() or Path(path).is_dir() else ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} cannot be read: {reason}; name another file") from error
    lines, texts = [], content.split("\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None and number == len(texts):  # a line that was written whole has an end
            say(f"{name}: its last line was cut off when a run was ended, and does not count")
            continue
        if not isinstance(line, dict) or kind not in line:
            raise ValueError(f"{name}: line {number} is no measurement; remove it, or name another file")
        wrong = next((each for each, form in (fields or {}).items() if not fits(line, {each: form})), None)
        if wrong is not None:
            raise ValueError(f"{name}: line {number} is a damaged measurement, see its {wrong}; remove it")
        lines.append(line)
    return lines


def measured(found: Sequence[Line]) -> str:
    """Days and commits of lines, for a table's heading: "2026-11-24 to 2026-11-25, commit a, b"."""
    days = sorted({str(line["date"])[:10] for line in found if line.get("date")})
    commits = ", ".join(sorted({str(line["commit"]) for line in found}))
    return ", ".join([*([" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []), f"commit {commits}"])


def fits(value: Any, form: Any) -> bool:
    """Whether a value has a form.

    Args:
        form: a predicate, [form] for a list of such values that is not empty, or {name: form} for an object with at
            least these fields.
    """
    if isinstance(form, dict):
        return isinstance(value, dict) and all(name in value and fits(value[name], form[name]) for name in form)
    if isinstance(form, list):
        return isinstance(value, list) and bool(value) and all(fits(each, form[0]) for each in value)
    return bool(form(value))


def is_text(value: Any) -> bool:
    """Whether a value is text of one line without control characters, fit for a message, a table and a picture."""
    return isinstance(value, str) and value.isprintable()


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 0 (and below 2**63)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold; an integer in JSON may have any number of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_above_0(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_number(value) and value > 0


def or_none(form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A form that also accepts null."""
    return lambda value: value is None or form(value)


def append(path: str | os.PathLike[str], lines: Sequence[Line]) -> None:
    """Append all of these lines or, if that fails, none of them. A last line that was cut off goes.

    Raises: OSError.
    """
    file, data = Path(path), dumps(lines).encode()
    if file.exists() and not file.is_file():
        file.write_bytes(data)  # a device is only written to
        return
    with file.open("a+b", buffering=0) as opened:
        end = opened.seek(0, os.SEEK_END)
        if end and _last_byte(opened) != b"\n":
            opened.seek(0)
            content = opened.read()
            begin = content.rfind(b"\n") + 1
            if _parsed(content[begin:]) is None:
                opened.truncate(end := begin)
            else:  # an editor left it without an end
                data = b"\n" + data
        try:
            num_written = opened.write(data)
            if num_written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            os.fsync(opened.fileno())
        except BaseException:
            opened.truncate(end)
            raise


def _last_byte(opened: IO[bytes]) -> bytes:
    opened.seek(-1, os.SEEK_END)
    return opened.read(1)


def _parsed(text: str | bytes) -> Any:
    """Parse a line as JSON; None if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def dumps(lines: Sequence[Line]) -> str:
    """Serialise lines as the content of a file. Raises: ValueError: a number is not finite."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def key(about: Mapping[str, Any]) -> str:
    """Digest of everything that affects a measurement; runs with the same key may be combined."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def rounds_done(lines: Sequence[Line], wanted: str) -> int:
    """Number of rounds that the lines hold for a key."""
    return sum(len(line["runs"]) for line in lines if line["key"] == wanted)
