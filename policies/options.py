"""Options of policies: checks that name the value and the rule, and budgets in tokens or shares of a prompt."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


def require(rule_holds: bool, option: str, value: object, rule: str) -> None:
    """Raise a ValueError with policy.<option>, its value and the rule, unless the rule holds."""
    if not rule_holds:
        raise ValueError(f"policy.{option}={as_given(value)} {rule}")


def as_given(value: object) -> object:
    """A value as options give it: a member of an enum by its name."""
    return value.name if isinstance(value, Enum) else value


def require_least(options: object, prefix: str = "", **least: int) -> None:
    """Raise a ValueError for the first of these options, whose names get a prefix, that is below its least value."""
    for name, value in least.items():
        require(getattr(options, name) >= value, prefix + name, getattr(options, name), f"must be at least {value}")


def require_default(options: object, *names: str, given: bool = True, rule: str, prefix: str = "") -> None:
    """Raise a ValueError for the first of these options that is given although it has no effect.

    Args:
        options: a dataclass; an option that has its default counts as not given.
        given: whether others are given by which these have none.
        rule: why, and what to do; {usual} in it is the option's default.
        prefix: of the options' names, such as "scorer.".
    """
    for each in fields(options) if given else ():  # type: ignore[arg-type]
        value = getattr(options, each.name)
        told = "has no effect " + rule.format(usual=as_given(each.default))
        require(each.name not in names or value == each.default, prefix + each.name, value, told)


def nested_options(policy: Any, name: str, example: str) -> Any:
    """An option that has options: those of a dictionary in place of the policy's defaults.

    Raises:
        ValueError: it is no dictionary of such options; the message ends with the example.
    """
    value, [default] = getattr(policy, name), [each.default_factory for each in fields(policy) if each.name == name]
    assert callable(default), name
    if isinstance(value, type(usual := default())):
        return value
    known = [each.name for each in fields(usual)]
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise ValueError(f"policy.{name}={value} must have {', '.join(known)} only, as in policy.{name}.{example}")
    return replace(usual, **value)


def choice(option: str, kind: type[E], value: E | str) -> E:
    """Member of `kind` that `value` is or names. Raises: ValueError that lists the names."""
    if isinstance(value, kind):
        return value
    require(value in kind.__members__, option, value, f"is not one of {', '.join(kind.__members__)}")
    return kind[str(value)]


Budget = int | float
"""Number of tokens if it is an integer, else a share of the prompt in (0, 1]."""


def check_budget(budget: Budget, option: str = "budget") -> None:
    """Check a budget. Raises: ValueError that names policy.<option>."""
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    rule_holds = is_number and (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1)
    rule = "must be a whole number of tokens of at least 1, or a share of the prompt in (0, 1]"
    require(rule_holds, option, budget, rule)


def budget_tokens(budget: Budget, prompt_tokens: int) -> int:
    """A budget as a number of tokens, at least 1."""
    return budget if isinstance(budget, int) else max(1, round(budget * prompt_tokens))
