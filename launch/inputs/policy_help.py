"""Help texts about policies: the list of their names, and the options of one policy from its dataclass."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from launch.inputs.policies import options_of
from policies import POLICIES

WIDTH, COLUMN = 118, 32
"""Width of a line, and column in which the meaning of an option begins."""


def choices(option: str, names: Sequence[str]) -> str:
    """All choices of an option, as lines of --help."""
    first, indent = f"  {option}=", " " * (len(option) + 3)
    text = textwrap.fill("| ".join(names), 100 + len(indent), initial_indent=first, subsequent_indent=indent)
    return text.replace("| ", "|")


def policy_help(name: str) -> str:
    """Help text of a policy: its options, their defaults and meanings."""
    kind = options_of(name)
    about = [inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")] if name in POLICIES else []
    about.append(inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0].partition("\n\nRaises:")[0])
    lines = list(_lines(kind, "policy")) or ["It has no options."]
    return "\n\n".join([f"policy={name}", *about, "\n".join(lines)]) + "\n"


def _lines(kind: type, section: str) -> Iterator[str]:
    meanings = _meanings(kind)
    for option in fields(kind):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if is_dataclass(default):
            yield from _lines(type(default), f"{section}.{option.name}")
        elif option.init:
            text = f"  {section}.{option.name}={shown(default)}"
            meaning = meanings.get(option.name, "")
            if isinstance(default, Enum):
                meaning += f" ({'|'.join(type(default).__members__)})"
            yield textwrap.fill(meaning, WIDTH, initial_indent=f"{text:<{COLUMN}}", subsequent_indent=" " * COLUMN)


def shown(default: Any) -> str:
    """A default as the command line writes it."""
    if isinstance(default, Enum):
        return default.name
    if isinstance(default, bool) or default is None:
        return {None: "null", True: "true", False: "false"}[default]
    return str(default)


def _meanings(kind: type) -> dict[str, str]:
    """Meanings of the options, from "Attributes:" in the docstrings of a dataclass and its bases."""
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        attributes = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for names, meaning in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            text = re.sub(r"\bNone\b", "null", " ".join(meaning.split()))  # as the command line writes it
            meanings |= {name.strip(): text for name in names.split(",")}
    return meanings
