"""Options of launch/first_day.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import get_args, get_type_hints

import yaml

from benchmarks.first_day.parts import PARTS, chosen
from runahead.config import RanksOptions, not_one_of, require


@dataclass(kw_only=True)
class FirstDayOptions:
    """Options of the first day.

    Attributes:
        parts: names of parts, or what names begin with up to an underscore; empty is all.
        without: likewise, parts that are left out.
        minutes: time budget. A part that would not fit any more is left out; None is no limit.
        out: folder of the page and of all logs, without those of an earlier run.
    """

    parts: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    minutes: float | None = None
    out: str = "first_day"

    def __post_init__(self) -> None:
        for option in ("parts", "without"):
            for name in getattr(self, option):
                if not chosen([name]):
                    raise ValueError(f"first_day.{option}={name} {not_one_of(name, [part.name for part in PARTS])}")
        if self.minutes is not None:
            require(
                0 < self.minutes < math.inf, "first_day.minutes", self.minutes, "must be a number of minutes above 0"
            )


@dataclass(kw_only=True)
class FirstDayRun:
    """Configuration of one run of launch/first_day.py."""

    ranks: RanksOptions = field(default_factory=RanksOptions)
    first_day: FirstDayOptions = field(default_factory=FirstDayOptions)

    def __post_init__(self) -> None:
        require(self.ranks.tensor == 1, "ranks.tensor", self.ranks.tensor, "has no use: parts set it; leave it out")
        report = self.ranks.fault_report
        require(report is None, "ranks.fault_report", report, "has no use: every part keeps its logs; leave it out")


def without_hydra(args: Sequence[str]) -> FirstDayRun:
    """The options on a machine without Hydra: each is name=value, the value in YAML.

    Raises:
        ValueError: an option is unknown, or its value cannot be used.
    """
    sections = {"first_day": FirstDayOptions, "ranks": RanksOptions}
    values: dict[str, dict[str, object]] = {name: {} for name in sections}
    known = [f"{name}.{option.name}" for name, kind in sections.items() for option in fields(kind)]
    for arg in args:
        name, _, text = arg.partition("=")
        if name not in known:
            raise ValueError(f"option {name} {not_one_of(name, known)}")
        section, _, option = name.partition(".")
        values[section][option] = _value(arg, name, text, get_type_hints(sections[section])[option])
        sections[section](**values[section])
    return FirstDayRun(ranks=RanksOptions(**values["ranks"]), first_day=FirstDayOptions(**values["first_day"]))  # type: ignore[arg-type]


def _value(arg: str, name: str, text: str, kind: object) -> object:
    """An option's value in YAML, if it is of this kind.

    Raises:
        ValueError: it is not.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{arg} cannot be used; see --help") from error
    kinds = get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return None
    if kind == list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{name} must be a list of names; write '{name}=[{text.strip('[]')}]'")
        return value
    for number, words in ((float, "a number"), (int, "a whole number")):
        if number in kinds:
            if isinstance(value, bool) or not isinstance(value, (int, number)):
                raise ValueError(f"{arg} must be {words}")
            return value
    return value if isinstance(value, str) else text  # a date, for instance, is a folder's name
