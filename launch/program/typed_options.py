"""Options in the types of the dataclass that is their schema, and messages about values that do not fit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from runahead.config import not_one_of
from runahead.failures import first_line

T = TypeVar("T")


def option_kinds(options: type, section: str = "") -> dict[str, Any]:
    """Types of the options by their full names (prompt.file, report), and of their sections (prompt), without None."""
    kinds: dict[str, Any] = {}
    hints = get_type_hints(options)
    for option in fields(options):
        name, kind = section + option.name, hints[option.name]
        if isinstance(kind, UnionType) and NoneType in kind.__args__:
            kind = Union[tuple(part for part in kind.__args__ if part is not NoneType)]  # noqa: UP007 (it is computed)
        kinds[name] = kind
        if is_dataclass(kind):
            kinds |= option_kinds(kind, f"{name}.")  # type: ignore[arg-type]
    return kinds


def leaf_names(kinds: Mapping[str, Any]) -> list[str]:
    """Full names of the options that are no sections."""
    return [name for name, kind in kinds.items() if not is_dataclass(kind)]


def suggestion(name: str, known: list[str]) -> str:
    """End of a message about an unknown name: the known one that it may stand for."""
    last_part = name.rpartition(".")[2]
    same_last_part = [option for option in known if option.rpartition(".")[2] == last_part]
    close = same_last_part or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "see --help"


def typed(values: Mapping[str, Any] | DictConfig, options: type[T], section: str = "") -> T:
    """Make an object of the dataclass `options` from `values`.

    Args:
        values: options by name.
        options: dataclass that is their schema.
        section: section of the options, for messages.

    Raises:
        ValueError: in one line, for a value of another type or one that the dataclass refuses.
    """
    merged = merged_into(options, values, section)
    try:
        made = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_in_our_words(error, values, options, section)) from error
    assert isinstance(made, options), type(made)
    return made


def merged_into(options: type, values: Mapping[str, Any] | DictConfig, section: str = "") -> DictConfig:
    """Defaults of the dataclass `options`, overridden by `values` in its types. Raises: ValueError, as `typed`."""
    try:
        schema = _schema(options)
    except OmegaConfBaseException as error:  # a field has a type that OmegaConf does not support
        raise ValueError(f"{options.__name__} cannot be used: {first_line(error)}") from error
    try:
        merged = OmegaConf.merge(schema, _with_counts(values, options))
    except OmegaConfBaseException as error:
        raise ValueError(_in_our_words(error, values, options, section)) from error
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _schema(options: type) -> Any:
    """Defaults of a dataclass with their types. Merging copies them, so that they are made once."""
    return OmegaConf.structured(options)


WHOLE_NUMBERS = (int, list[int], int | float, int | str)
"""Types of the options that take `counted` numbers."""

LISTS_OF_ONE = ("model.adapter",)
"""Options that take one name in place of a list of it."""


def counted(value: Any) -> Any:
    """A whole number in k, M or G (1024 each), such as 128k, as an int, and the numbers of a list; else the value."""
    if isinstance(value, list):
        return [counted(each) for each in value]
    found = (
        re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kmg])", value, re.ASCII | re.I) if isinstance(value, str) else None
    )
    if found is None:
        return value
    number = Fraction(found[1]) * 1024 ** (1 + "kmg".index(found[2].lower()))
    return int(number) if number.denominator == 1 else value


def _with_counts(values: Mapping[str, Any] | DictConfig, options: type) -> Mapping[str, Any]:
    """The values with `counted` numbers where the dataclass has whole numbers, and lists of one name."""
    plain: Any = OmegaConf.to_container(values, resolve=False) if isinstance(values, DictConfig) else values

    def with_counts(values: Any, section: str) -> Any:
        if section in LISTS_OF_ONE and isinstance(values, str):
            return [values]
        if not isinstance(values, Mapping):
            return counted(values) if kinds.get(section) in WHOLE_NUMBERS else values
        return {name: with_counts(value, f"{section}.{name}".lstrip(".")) for name, value in values.items()}

    kinds = option_kinds(options)
    return with_counts(plain, "")


WORDS_FOR_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    int | str: "a whole number, or auto",
    int | float: "a whole number of tokens of at least 1, or a share of the prompt in (0, 1]",
    dict[str, Any]: "a set of options such as {budget:512}",
    list[float]: "a list of numbers such as [0.6,0.4]",
    list[int]: "a list of whole numbers such as [1024,2048]",
    list[str]: "a list of names such as [single,kvr_s]",
    dict[int, float]: "a set of token ids with numbers such as {50:-100}",
}
"""The values of a type, as a message names them."""


def _in_our_words(
    error: OmegaConfBaseException, values: Mapping[str, Any] | DictConfig, options: type, section: str
) -> str:
    value: Any = OmegaConf.to_container(values, resolve=False) if isinstance(values, DictConfig) else values
    kinds = option_kinds(options)
    key = (error.full_key or "").partition("[")[0]
    if not key:  # OmegaConf does not say which section got a single value
        sections = [name for name in value if is_dataclass(kinds.get(name)) and not isinstance(value[name], dict)]
        key = sections[0] if sections else ""
    prefix = f"{section}." if section else ""
    name = prefix + key
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) and part in value else value
    if isinstance(error, ConfigKeyError):
        return f"unknown option {shortened(name)}; {suggestion(name, [prefix + leaf for leaf in leaf_names(kinds)])}"
    if isinstance(error, MissingMandatoryValue):
        return f"{name} is missing; give a value"
    if key not in kinds or (isinstance(value, str) and "${" in value):
        return f"{name}={shortened(str(value))} cannot be used: {first_line(error)}"
    kind = kinds[key]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{name}={shortened(str(value))} {not_one_of(value, kind.__members__)}"
    if is_dataclass(kind):
        what = f"one option but several: {', '.join(f'{name}.{member.name}' for member in fields(kind))}"
    else:
        what = WORDS_FOR_TYPES.get(kind, "a value that it can take")
    return f"{name}={shortened('null' if value is None else str(value))} is not {what}"


def shortened(text: str) -> str:
    """A user's text in a message: on one line, shortened to 80 characters."""
    line = " ".join(text.splitlines())
    return line if len(line) <= 80 else line[:77] + "..."
