"""Versions of torch and transformers that Runahead takes: the ranges of pyproject.toml, which are what is tested."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

LIBRARIES = ("torch", "transformers")


def ranges() -> dict[str, SpecifierSet]:
    """Ranges of the libraries, by the checkout that this is, else by the installed package; none if by neither."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    except (OSError, ValueError, KeyError):
        try:
            lines = metadata.requires("runahead") or []
        except metadata.PackageNotFoundError:
            lines = []
    return {each.name: each.specifier for each in _parsed(lines) if each.name in LIBRARIES}


def in_words(library: str) -> str:
    """The range of a library, such as "5.22 or newer, below 5.25"; "any" if it is not known."""
    words, told = {">=": "{} or newer", "<": "below {}"}, dict[str, str]()
    for each in ranges().get(library, SpecifierSet()):
        told[str(each)] = words.get(each.operator, each.operator + "{}").format(each.version)
    ordered = sorted(told, key=lambda each: (not each.startswith(">"), not each.startswith("<"), each))
    return ", ".join(told[each] for each in ordered) or "any"


def outside() -> Iterator[str]:
    """A sentence about each library whose version is outside its range."""
    for library, taken in ranges().items():
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:  # it says so when it is imported
            continue
        if not taken.contains(version, prereleases=True):
            yield (
                f"{library} {version} is not one that Runahead was tested with ({in_words(library)}); install one of "
                "these if anything is wrong"
            )


def _parsed(lines: list[str]) -> Iterator[Requirement]:
    for line in lines:
        try:
            yield Requirement(line)
        except InvalidRequirement:
            continue
