"""The policies that are compared: each entry of policies=, under each budget that it can have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from launch.inputs.policies import options_of, policies_of
from policies import POLICIES, WRAPPERS
from policies.base import Budget
from policies.pyramidinfer import Schedule, Select
from policies.retriever import Retriever
from runahead.config import CacheOptions, Positions, choice
from runahead.thinning.rank_policies import RankPolicies

RECENT_RATIO = 0.2
"""Default `recent_ratio` of PyramidInfer: upper limit of the share of kept tokens that are recent ones."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy under a budget.

    A policy that retrieves does so from texts of any length, unless its settings say otherwise.

    Attributes:
        label: the policy for readers, without the budget.
        budget: None where the policy has none, or has its own among its options.
        settings: name and options that it was made of.
        files: digest of what it reads, by path.
    """

    label: str
    budget: Budget | None
    settings: dict[str, Any]
    policies: RankPolicies
    files: dict[str, str]

    @property
    def name(self) -> str:
        return self.label if self.budget is None else f"{self.label}, {budget_text(self.budget)}"


def budget_text(budget: Budget | None) -> str:
    """Text of a budget for tables and pictures."""
    if budget is None:
        return "-"
    return f"{budget:,} tokens" if isinstance(budget, int) else f"{100 * budget:g}%"


def contenders(entries: Sequence[Any], budgets: Sequence[Budget]) -> list[Contender]:
    """Make the contenders of all entries and budgets, in order.

    Raises:
        ValueError: in one line, for an unknown policy or option, a budget that a policy cannot have, or a policy twice.
    """
    found = []
    for entry in entries:
        settings = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(settings, dict):
            raise ValueError(f"policies has {entry}, which is neither a name nor {{name:<policy>,<option>:<value>}}")
        has_own = _has_own_budget(settings)
        _policies(settings if has_own else _with_budget(settings, 1.0))  # finds names and options
        label = _label(settings)
        if not has_own and not budgets:
            raise ValueError(f"policies: {label} needs budgets=[...], or a budget among its options")
        found += [_contender(label, budget, settings) for budget in ([None] if has_own else budgets)]
    names = [contender.name for contender in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"policies has {twice[0]} more than once; leave one out")
    return found


def _contender(label: str, budget: Budget | None, settings: dict[str, Any]) -> Contender:
    if budget is not None:
        settings = _with_budget(settings, budget)
    try:
        policies = _policies(settings)
    except ValueError as error:
        raise ValueError(f"{label} with a budget of {budget_text(budget)}: {error}") from error
    files = {path: _digest(Path(path)) for policy in policies.last if (path := policy.reads) is not None}
    return Contender(label=label, budget=budget, settings=settings, policies=policies, files=files)


def _digest(path: Path) -> str:
    """Digest of a file, or of the files of a folder."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(hashlib.sha256(each.read_bytes()).digest() for each in files)).hexdigest()[:16]


def _policies(settings: dict[str, Any]) -> RankPolicies:
    """Build the policies of these settings. Raises: ValueError."""
    own = {name: value for name, value in settings.items() if name not in ("positions", "bits")}
    positions = choice("positions", Positions, settings.get("positions", Positions.original))
    storage = CacheOptions(bits=settings.get("bits"))
    return RankPolicies.everywhere(policies_of(_at_every_length(own), "policies"), positions, storage)


def _at_every_length(settings: Any) -> Any:
    """The settings of a policy, or of steps in a sequence, by which it retrieves from texts of any length.

    By default policies do not retrieve where that saves no time; what they lose would not be measured.
    """
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, dict):
        return settings
    name = str(settings.get("name"))
    if name == "sequence" and isinstance(settings.get("steps"), list):
        return settings | {"steps": [_at_every_length(step) for step in settings["steps"]]}
    retrieves = name in POLICIES and issubclass(POLICIES[name], Retriever)
    return {"min_tokens": 0} | settings if retrieves else settings


def _has_own_budget(settings: dict[str, Any]) -> bool:
    """Whether the settings already say how much to keep. True of a name that is not in the table of policies."""
    if settings.get("name") in WRAPPERS:
        return _has_own_budget(_scorer(settings))
    if settings.get("name") not in POLICIES:
        return True
    options = _options(settings["name"])
    if "mean_keep" in options and {"mean_keep", "budget"} & settings.keys():
        return True
    if "mean_keep" in options:  # it has no effect with these
        return settings.get("schedule") == Schedule.cosine.name or settings.get("select") == Select.top_p.name
    return "budget" not in options or "budget" in settings


def _with_budget(settings: dict[str, Any], budget: Budget) -> dict[str, Any]:
    """A policy's settings with a budget in them; for PyramidInfer a share is the mean over layers."""
    if settings["name"] in WRAPPERS:
        return settings | {"scorer": _with_budget(_scorer(settings), budget)}
    if "mean_keep" not in _options(settings["name"]) or isinstance(budget, int):
        return settings | {"budget": budget}
    # A layer must keep room for tokens that are not recent, and no minimum may raise the mean, above all in short
    # chunks.
    return {"recent_ratio": min(RECENT_RATIO, budget / 2), "min_tokens": 1} | settings | {"mean_keep": budget}


def _scorer(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the policy that another one wraps."""
    [default] = [field.default for field in fields(options_of(settings["name"])) if field.name == "scorer"]
    scorer = settings.get("scorer", default)
    return scorer if isinstance(scorer, dict) else {"name": scorer}


def _options(name: str) -> set[str]:
    return {field.name for field in fields(POLICIES[name])}  # type: ignore[arg-type]


def _label(settings: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={_short(value)}" for name, value in settings.items() if name != "name")
    return settings["name"] + (f"({options})" if options else "")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_short, value)) + "]"
    return _label(value) if isinstance(value, dict) and "name" in value else str(value)
