"""Policies from policy= options: one, several in sequence, different ones by rank, or one from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf

from launch.program.compose import merged_into, typed
from policies import POLICIES
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from runahead.config import Positions, choice

if TYPE_CHECKING:
    from policies.base import Policy
    from runahead.thinning.rank_policies import RankPolicies


@dataclass(kw_only=True)
class SequenceOptions:
    """Policies one after another, each on what the one before keeps.

    Attributes:
        steps: names of policies, or {name: ..., option: ...}.
    """

    steps: Any = None


@dataclass(kw_only=True)
class RankPlaces:
    """Policies by place in the chain: names, or {name: ..., option: ...}.

    Attributes:
        last: policy of the rank that decodes.
        others: policy of the ranks before it.
    """

    last: Any = None
    others: Any = None


@dataclass(kw_only=True)
class PerRankOptions:
    """Different policies on the rank that decodes and on those before it.

    Attributes:
        ranks: policies by place; full where none is given.
    """

    ranks: RankPlaces = field(default_factory=RankPlaces)


@dataclass(kw_only=True)
class FileOptions:
    """A policy that a Python file of your own defines.

    Attributes:
        path: file with one dataclass that inherits from policies.base.Policy.
        options: values of its fields.
    """

    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


T = TypeVar("T")

COMBINED: dict[str, type] = {
    "prompt_cache": PromptCacheOptions,
    "sequence": SequenceOptions,
    "per_rank": PerRankOptions,
    "file": FileOptions,
}
"""Choices of policy= that are not policies themselves, with the dataclasses of their options."""

NAMES = (*POLICIES, *COMBINED)


def options_of(name: str) -> type:
    """Dataclass whose fields are the options of a policy."""
    return POLICIES[name] if name in POLICIES else COMBINED[name]


def checked(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Name, positions and given options of policy=, each option in its type. An option that is null is not given.

    Raises:
        ValueError: in one line, for an unknown name or option, or a value of another type. `rank_policies` checks the
            values themselves.
    """
    given = {option: value for option, value in policy.items() if value is not None}
    name = given.pop("name", "full")
    positions = choice("policy.positions", Positions, given.pop("positions", Positions.original))
    if name not in NAMES:
        raise ValueError(f"policy={name} is not one of {', '.join(NAMES)}")
    shared = {"name": name, "positions": positions.name}
    if not given:  # do not import the policy's module, which imports torch
        return shared
    kind = options_of(name)
    _require_known(name, kind, given, "policy")
    merged = merged_into(kind, given, "policy")
    return shared | _as_given(OmegaConf.to_container(merged, resolve=True, enum_to_str=True), given)


def _as_given(values: Any, given: Any) -> Any:
    """Typed values of the options that were given."""
    if not isinstance(values, dict) or not isinstance(given, dict):
        return values
    return {option: _as_given(values[option], value) for option, value in given.items()}


def reported(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Name and given options of the policy, as values of JSON."""
    return {
        option: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for option, value in policy.items()
        if (option, value) != ("positions", "original")
    }


def rank_policies(policy: Mapping[str, Any]) -> RankPolicies:
    """Policies of a run.

    Args:
        policy: name, positions and options, as `checked` returns them.

    Raises:
        ValueError: in one line, for a value that a policy refuses or an option that it does not have.
    """
    from runahead.thinning.rank_policies import RankPolicies

    positions = Positions[policy["positions"]]
    step = {option: value for option, value in policy.items() if option != "positions"}
    if step["name"] == "prompt_cache":  # reuses keys and values rather than thinning them out
        prompt_cache_options(policy)
        return RankPolicies()
    if step["name"] != "per_rank":
        return RankPolicies.everywhere(policies_of(step, "policy"), positions)
    places = step.get("ranks", {})
    last, others = places.get("last"), places.get("others")
    if last is None and others is None:
        raise ValueError("policy=per_rank needs policy.ranks.last=<policy> or policy.ranks.others=<policy>")
    return RankPolicies(
        positions=positions,
        last=policies_of(last or "full", "policy.ranks.last"),
        others=policies_of(others or "full", "policy.ranks.others"),
    )


def prompt_cache_options(policy: Mapping[str, Any]) -> PromptCacheOptions:
    """Options of policy=prompt_cache. Raises: ValueError."""
    if policy["positions"] != Positions.original.name:
        raise ValueError("policy.positions=reencoded does not go with policy=prompt_cache, whose positions are fixed")
    settings = {option: value for option, value in policy.items() if option not in ("name", "positions")}
    return _made("prompt_cache", PromptCacheOptions, settings, "policy")


def policies_of(step: Any, option: str) -> list[Policy]:
    """Policies of a step: a name, {name: ..., and its options}, or a sequence of steps.

    Args:
        step: a name, {name: ..., option: ...}, or a sequence.
        option: name of the step in messages.

    Raises:
        ValueError: as `rank_policies`.
    """
    from launch.inputs.policy_file import policy_class
    from policies.base import Policy

    if isinstance(step, str):
        step = {"name": step}
    if not isinstance(step, dict) or not isinstance(step.get("name"), str):
        raise ValueError(f"{option}={step!r} is neither a policy's name nor {{name:<policy>,<option>:<value>}}")
    settings = dict(step)
    name = settings.pop("name")
    if name == "sequence":
        steps = settings.pop("steps", None)
        if not isinstance(steps, list) or not steps or settings:
            raise ValueError(f"{option}=sequence needs steps and nothing else, such as policy.steps=[pyramidinfer,h2o]")
        found = [policy for each in steps for policy in policies_of(each, f"{option}.steps")]
        votes = [policy for policy in found if type(policy).carry is not Policy.carry]
        queries = [policy for policy in found if policy.queries_from is not None]
        for accumulated, which in (("votes", votes), ("queries", queries)):
            if len(which) > 1:
                raise ValueError(
                    f"{option}.steps has more than one policy that accumulates {accumulated}; use one of them"
                )
        return found
    if name == "file":
        file = _made(name, FileOptions, settings, option)
        kind = policy_class(file.path)
        return [_made(kind.__name__, kind, file.options, option)]
    if name not in POLICIES:
        raise ValueError(f"{option}={name} is not one of {', '.join([*POLICIES, 'sequence', 'file'])}")
    policy = _made(name, POLICIES[name], settings, option)
    return [] if name == "full" else [policy]


def _made(name: str, kind: type[T], settings: Mapping[str, Any], option: str) -> T:
    _require_known(name, kind, settings, option)
    return typed(settings, kind, "policy")


def _require_known(name: str, kind: type, settings: Mapping[str, Any], option: str) -> None:
    """Raise a ValueError for the first setting that is no option of the policy."""
    options = [each for each in fields(kind) if each.init]
    known = [each.name for each in options]
    for setting, value in settings.items():
        if setting in known:
            continue
        renamed = next((each.name for each in options if each.metadata.get("formerly") == setting), None)
        if renamed is not None and not isinstance(value, dict):
            raise ValueError(
                f"policy.{setting}={value} is no option of {name}, which calls it {renamed}; "
                f"use policy.{renamed}={value}"
            )
        others = [other for other in NAMES if setting in {each.name for each in fields(options_of(other))}]
        if name == "full" and others:
            raise ValueError(f"policy.{setting}={value} has no effect with policy=full; add policy={'|'.join(others)}")
        if len(others) == 1 and others[0] in COMBINED:
            raise ValueError(f"{option}: {name} has no option {setting}; add policy={others[0]}, which has it")
        has = f"it has {', '.join(known)}" if known else "it has no options"
        raise ValueError(f"{option}: {name} has no option {setting}; {has}")
