"""Inputs that begin as valid ones, bytes or JSON, and are changed in a few places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

PLACES = st.integers(0, 2**32)

PIECES: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xc3",
    b"\r\n",
    b"\r",
    b"\n",
    b"\n\n\n",
    b" ",
    b'"',
    b"'",
    b"\\",
    b"\\ud800",
    b"\\u0000",
    b"\xe2\x80\xa8",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"null",
    b"true",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"-1",
    b"0",
    b"1e999",
    b"1e-999",
    b"1.5",
    b"18446744073709551616",
    b"9" * 400,
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'"' + b"x" * 100_000 + b'"',
    b"<!--",
    b"../../etc/passwd",
)

NUMBERS = (0, -1, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1e-320, 1e308)
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    *NUMBERS,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "-1",
    "nan",
    "\ud800",
    "\0",
    "\u2028\n",
    "Ⅷ٣",
    "a" * 10_000,
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    {"": []},
)
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]

VALUES: SearchStrategy[Any] = st.sampled_from((*STRANGE, DEEP)) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@st.composite
def changed_bytes(draw: st.DrawFn, valid: Sequence[bytes], pieces: Sequence[bytes] = PIECES) -> bytes:
    """One of these contents with up to four changes; now and then bytes of no origin at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    data = draw(st.sampled_from(list(valid)))
    for _ in range(draw(st.integers(1, 4))):
        data = changed(data, draw(st.sampled_from(CHANGES)), draw(PLACES), draw(PLACES), draw(st.sampled_from(pieces)))
    return data


CHANGES = (
    "flip",
    "flip",
    "insert",
    "insert",
    "insert",
    "replace a word",
    "replace a word",
    "replace a number",
    "cut out",
    "repeat",
    "truncate",
    "end",
    "begin",
    "repeat a line",
    "drop a line",
    "line ends",
    "utf-16",
    "latin-1",
)


def changed(data: bytes, change: str, place: int, other: int, piece: bytes) -> bytes:
    """One change; `place` and `other` say where, modulo what there is."""
    at = place % (len(data) + 1)
    length = other % 64
    if change == "flip" and data:
        at %= len(data)
        return data[:at] + bytes([data[at] ^ (1 << other % 8)]) + data[at + 1 :]
    if change in ("replace a word", "replace a number"):
        pattern = rb"[A-Za-z_][\w.-]*" if change == "replace a word" else rb"-?\d[\d.eE+-]*"
        found = list(re.finditer(pattern, data))
        if found:
            chosen = found[place % len(found)]
            return data[: chosen.start()] + piece + data[chosen.end() :]
    if change in ("repeat a line", "drop a line"):
        lines = data.split(b"\n")
        line = place % len(lines)
        return b"\n".join([*lines[:line], *[lines[line]] * (2 if change == "repeat a line" else 0), *lines[line + 1 :]])
    match change:
        case "cut out":
            return data[:at] + data[at + length :]
        case "repeat":
            return data[:at] + data[at : at + length] * 3 + data[at + length :]
        case "truncate":
            return data[:at]
        case "end":
            return data + piece
        case "begin":
            return piece + data
        case "line ends":
            return data.replace(b"\n", b"\r\n")
        case "utf-16":
            return data.decode("utf-8", errors="replace").encode("utf-16")
        case "latin-1":
            return data.decode("utf-8", errors="replace").encode("latin-1", errors="replace") + b"\xe4"
    return data[:at] + piece + data[at:]


@st.composite
def changed_json(draw: st.DrawFn, valid: Sequence[Any], values: SearchStrategy[Any] = VALUES) -> bytes:
    """One of these values as JSON, with other values in up to three places, fields missing, new or given twice."""
    value = draw(st.sampled_from(list(valid)))
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_of(value))
        kind = draw(st.integers(0, 9))
        value = with_change(value, paths[draw(PLACES) % len(paths)], kind, draw(values) if kind > 2 else None)
    text = json.dumps(value, indent=draw(st.sampled_from([None, None, 1])), ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        text = given_twice(text, draw(PLACES))
    data = text.encode("utf-8", errors="surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        change, piece = draw(st.sampled_from(CHANGES)), draw(st.sampled_from(PIECES))
        data = changed(data, change, draw(PLACES), draw(PLACES), piece)
    return data


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the value itself and of all that is in it, a few of each list."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths_of(inner, (*path, name))
    if isinstance(value, list) and len(path) < 20:
        for number, inner in enumerate(value[:8]):
            yield from paths_of(inner, (*path, number))


def with_change(value: Any, path: tuple[Any, ...], kind: int, other: Any) -> Any:
    """A copy: what is at `path` is left out (0), there twice in its list (1), wrapped in a list (2), or another."""
    if not path:
        return [value] if kind == 2 else value if kind < 2 else other
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    name = path[0]
    if len(path) > 1:
        copy[name] = with_change(value[name], path[1:], kind, other)
    elif kind == 0:
        del copy[name]
    elif kind == 1 and isinstance(copy, list):
        copy.insert(name, copy[name])
    elif kind == 1:
        copy[f"{name}_"] = copy[name]
    else:
        copy[name] = [value[name]] if kind == 2 else other
    return copy


def given_twice(text: str, place: int) -> str:
    """A JSON text in which one field is there twice, if any field is a plain one."""
    found = list(re.finditer(r'"\w+": [\w".+-]+, ', text))
    if not found:
        return text
    chosen = found[place % len(found)]
    return text[: chosen.end()] + chosen[0] + text[chosen.end() :]
