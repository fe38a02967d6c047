"""A row of a table of combinations: facts that hold together, and what the user is told then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from runahead.features.facts import FACTS, OF_MODEL, OF_RANKS
from runahead.features.setup import Setup

PLACES = ("last", "others")
"""Places in the chain that have policies of their own."""


@dataclass(frozen=True)
class Combination(ABC):
    """Facts of which something follows where all of them hold.

    Attributes:
        facts: names in `FACTS`. Facts that take longer come after those that make them matter.
    """

    facts: tuple[str, ...]

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The message to the user, with {0} for what the first fact is called, and so on, {model} and {retriever}."""

    def message(self, setup: Setup, known: dict[str, str | None] | None = None) -> str | None:
        """The message to the user if all facts hold, else None. `known` has, and gets, what was asked of `setup`."""
        known = {} if known is None else known
        for name in self.facts:
            if name not in known:
                known[name] = FACTS[name](setup)
            if not known[name]:  # it does not hold, or is not known yet
                return None
        words = [known[name] for name in self.facts]
        return self.sentence.format(*words, model=setup.model, retriever=setup.retriever)


C = TypeVar("C", bound=Combination)


def that_hold(rows: Sequence[C], setup: Setup) -> Iterator[tuple[C, str]]:
    """The rows that hold, in the order of the table, each with its message, once per place in the chain."""
    places = _places(setup)
    known: list[dict[str, str | None]] = [{} for _ in places]
    for row in rows:
        for each, asked in zip(places, known, strict=True):
            if message := row.message(each, asked):
                yield row, message


def undecided(rows: Sequence[C], setup: Setup) -> list[tuple[C, tuple[str, ...]]]:
    """The rows that may still hold, with the facts that are not known yet: all of the model, ranks or prompt."""
    found: dict[tuple[C, tuple[str, ...]], None] = {}
    for row in rows:
        for each in _places(setup):
            words = {name: FACTS[name](each) for name in row.facts}
            unknown = tuple(name for name, word in words.items() if word is None)
            if "" not in words.values() and unknown and all(name in OF_MODEL or name in OF_RANKS for name in unknown):
                found[row, unknown] = None
    return list(found)


def others_by_first(rows: Sequence[Combination]) -> dict[str, list[str]]:
    """A table in words: for the first fact of each row, the others."""
    others: dict[str, list[str]] = {}
    for row in rows:
        first, *rest = row.facts
        others.setdefault(first, []).append(" with ".join(rest) or "anything")
    return others


def _places(setup: Setup) -> list[Setup]:
    """The setup for each place that facts are asked of; one, if the policies of both are alike."""
    policies = setup.policies
    is_alike = policies is None or policies.last == policies.others
    return [setup] if is_alike else [replace(setup, place=place) for place in PLACES]
