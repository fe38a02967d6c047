"""Facts, and makers of those of which several subjects have some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runahead.features.setup import Setup

Words = str | None
"""Name of a fact that holds in messages; "" if it does not hold, and None if that is not known yet."""

Fact = Callable[[Setup], Words]


def if_(holds: object, words: str) -> str:
    return words if holds else ""


def known(name: str, words: Callable[[Any], Words]) -> Fact:
    """Something about an attribute of `Setup`, once that is known."""

    def fact(setup: Setup) -> Words:
        found = getattr(setup, name)
        return None if found is None else words(found)

    return fact


def option(name: str, section: str | None = None) -> Fact:
    """An option that is not off, by its name on the command line, of a section of `Setup` or of `Setup.options`."""

    def words(options: Any) -> Words:
        if section is None and name not in options:
            return None
        value = options[name] if section is None else getattr(options, name.partition(".")[2])
        return if_(value not in (None, False, 0, ""), f"{name}={'true' if value is True else value}")

    return known(section or "options", words)


def choice(section: str, *names: str) -> Fact:
    """The choice of a section, such as prefill, if it is one of these."""
    return known(section, lambda given: if_(given.name.name in names, f"{section}={given.name.name}"))


def other(section: str, *names: str) -> Fact:
    """The choice of a section, such as prefill, if it is none of these."""
    return known(section, lambda given: if_(given.name.name not in names, f"{section}={given.name.name}"))


def number(name: str, words: str = "{}") -> Fact:
    """A number of `Setup` that is above 1."""
    return known(name, lambda found: if_(found > 1, words.format(found)))


def of_last(fact: Fact) -> Fact:
    """Mark a fact of the rank that decodes alone: it does not hold for the place of earlier ranks."""
    return lambda setup: fact(setup) if setup.place == "last" else ""
