"""JSON format of a lookup table: written with one entry per line, read with every value checked."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import inf
from types import NoneType
from typing import Any, TypeVar, get_type_hints

from partitioner.cost.link import Link
from partitioner.table.entry import DATE, TableEntry, shown
from partitioner.table.fingerprint import ADDED, Fingerprint, ModelShape

FORMAT = "runahead lookup table"
VERSION = 1

LATER: dict[Any, Set[str]] = {
    Fingerprint: {"layers_in_flight", "speeds", *ADDED},
    ModelShape: {"num_states", "state_bytes"},
}
"""Fields that the first tables did not have; a missing one gets its default."""

FUSED_BEFORE = "auto"
"""Older files say this of models whose modules are fused: model.fuse was off or auto."""

# Types of values as error messages name them.
WORDS = {int: "a whole number", float: "a number", str: "printable text", bool: "true or false", NoneType: "null"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _LinkFields:
    """A link as it is in the file; see `Link.as_json`."""

    latency_s: float
    bandwidth_Bps: float | None
    shared: bool


def table_json(fingerprint: Fingerprint, entries: Sequence[TableEntry]) -> str:
    """Write a table as JSON."""
    about = asdict(fingerprint) | {"link": None if fingerprint.link is None else fingerprint.link.as_json()}
    for name in ADDED:
        if name not in fingerprint.added:
            del about[name]
    head = json.dumps({"format": FORMAT, "version": VERSION, "fingerprint": about}, indent=2, allow_nan=False)
    lines = ",".join(f"\n    {json.dumps(asdict(entry), allow_nan=False)}" for entry in entries)
    return f'{head[:-2]},\n  "entries": [{lines}\n  ]\n}}\n'


def parse_table(data: bytes) -> tuple[Fingerprint, list[TableEntry]]:
    """Parse the bytes of a table's file.

    Raises:
        ValueError: anything is wrong; one line.
    """
    table = _parsed(data)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f'is not a lookup table: it has no "format": "{FORMAT}"')
    version = table.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"has version {shown(version)}, but this program reads version {VERSION}; search again")
    _check_names("the table", table, {"format", "version", "fingerprint", "entries"})
    fingerprint = _fingerprint(table["fingerprint"])
    if not isinstance(table["entries"], list):
        raise ValueError(f"entries {shown(table['entries'])} must be a list")
    entries = [_entry(number, value) for number, value in enumerate(table["entries"], start=1)]
    for before, entry in pairwise(entries):
        if (before.length, before.ranks) >= (entry.length, entry.ranks):
            raise ValueError(
                f"entries must ascend by length, then ranks, without repeats, but {entry.length} tokens on "
                f"{entry.ranks} ranks come after {before.length} on {before.ranks}"
            )
    return fingerprint, entries


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not JSON: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not a lookup table: brackets are nested too deep") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"holds {constant}, which is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the field {shown(repeated)} twice in one place")
    return values


def _entry(number: int, value: Any) -> TableEntry:
    about = f"entry {number}"
    if isinstance(value, dict):
        length, ranks = value.get("length"), value.get("ranks")
        if type(length) is int and type(ranks) is int:
            about += f" ({shown(length)} tokens, {shown(ranks)} ranks)"
    return _read(TableEntry, about, value)


def _fingerprint(value: Any) -> Fingerprint:
    fingerprint = _read(Fingerprint, "fingerprint", value)
    if fingerprint.fuse == FUSED_BEFORE:
        fingerprint = replace(fingerprint, fuse="on")
    if DATE.fullmatch(fingerprint.date) is None:
        raise ValueError(f"fingerprint: date {shown(fingerprint.date)} must look like 2026-01-31T12:00:00Z")
    if fingerprint.layers_in_flight < 2:
        raise ValueError(f"fingerprint: layers_in_flight {fingerprint.layers_in_flight} must be at least 2")
    if fingerprint.tensor < 1:
        raise ValueError(f"fingerprint: tensor {fingerprint.tensor} must be at least 1")
    if any(not 0 < speed < inf for speed in fingerprint.speeds or ()):
        raise ValueError(f"fingerprint: speeds {shown(list(fingerprint.speeds or ()))} must be above 0")
    for name in ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        of_attention = name in ("num_heads", "num_kv_heads", "head_dim")
        least = 0 if of_attention and fingerprint.model.num_states else 1
        if (number := getattr(fingerprint.model, name)) < least:
            raise ValueError(f"fingerprint.model: {name} {number} must be at least {least}")
    return fingerprint


def _read(kind: type[T], about: str, value: Any) -> T:
    """Make a dataclass from a JSON object that has exactly its fields (except those in `LATER`), of their types."""
    types = get_type_hints(kind)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    _check_names(about, value, names, may_miss=LATER.get(kind, frozenset()))
    read = {name: _typed(types[name], f"{about}: {name}", value[name]) for name in value}
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{about}: {error}") from error


def _typed(kind: Any, about: str, value: Any) -> Any:
    """Check that a value has the type `kind`, and return it."""
    if kind == Link | None:
        return None if value is None else _link(value)
    if kind is ModelShape:
        return _read(ModelShape, "fingerprint.model", value)
    if kind == tuple[int, ...]:
        _check_list(about, value)
        return tuple(_typed(int, about, each) for each in value)
    if kind == tuple[float, ...] | None:
        if value is None:
            return None
        _check_list(about, value, of="numbers")
        return tuple(_typed(float, about, each) for each in value)
    if kind == dict[str, str | None]:
        if not isinstance(value, dict):
            raise ValueError(f"{about} {shown(value)} must be an object of texts")
        return {_typed(str, about, key): _typed(str | None, about, each) for key, each in value.items()}
    choices = getattr(kind, "__args__", (kind,))
    if type(value) in choices and not (isinstance(value, str) and not value.isprintable()):
        return value
    if float in choices and type(value) is int and abs(value) < 1e300:
        return float(value)
    raise ValueError(f"{about} {shown(value)} must be {' or '.join(WORDS[choice] for choice in choices)}")


def _link(value: Any) -> Link:
    link = _read(_LinkFields, "fingerprint.link", value)
    try:
        return Link.from_json(vars(link))
    except ValueError as error:
        raise ValueError(f"fingerprint.link: {error}") from error


def _check_names(about: str, value: Any, names: set[str], *, may_miss: Set[str] = frozenset()) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{about} {shown(value)} must be an object with the fields {', '.join(sorted(names))}")
    if missing := sorted(names - may_miss - set(value)):
        raise ValueError(f"{about} has no {', '.join(missing)}")
    if unknown := sorted(set(value) - names):
        raise ValueError(f"{about} has the unknown field {shown(unknown[0])}")


def _check_list(about: str, value: Any, of: str = "whole numbers") -> None:
    if not isinstance(value, list):
        raise ValueError(f"{about} {shown(value)} must be a list of {of}")
