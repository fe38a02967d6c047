"""From policy= options to policies: one, several that follow each other, or different ones on the last rank."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from launch.inputs.options import PolicyName, PolicyOptions
from launch.inputs.prompt_cache import check_options
from policies import POLICIES
from policies.base import Policy
from runahead.config import Positions
from runahead.thinning.rank_policies import RankPolicies


def rank_policies(options: PolicyOptions) -> RankPolicies:
    """The policies of a run.

    Raises:
        ValueError: in one line, for a value that a policy refuses or an option that it does not have.
    """
    if options.name is PolicyName.prompt_cache:  # reuses K,V rather than thinning them out
        check_options(options)
        return RankPolicies()
    if options.name is not PolicyName.per_rank:
        return RankPolicies.everywhere(policies_of(_given(options), "policy"), options.positions)
    return RankPolicies(
        positions=options.positions,
        last=policies_of(options.ranks.last or "full", "policy.ranks.last"),
        others=policies_of(options.ranks.others or "full", "policy.ranks.others"),
    )


def given_options(options: PolicyOptions) -> dict[str, Any]:
    """The policy's name and the options that were given, as JSON can hold them."""
    places = {place: value for place, value in asdict(options.ranks).items() if value is not None}
    given = {name: value for name, value in asdict(options).items() if value is not None and name != "ranks"}
    if options.positions is Positions.original:
        del given["positions"]
    else:
        given["positions"] = options.positions.name
    return given | {"name": options.name.name} | ({"ranks": places} if places else {})


SHARED = ("ranks", "positions")
"""Options that are no policy's own."""


def _given(options: PolicyOptions) -> dict[str, Any]:
    """The name and what was set beside it."""
    given = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in SHARED}
    return {"name": options.name.name} | {name: value for name, value in given.items() if value is not None}


def policies_of(step: Any, option: str) -> list[Policy]:
    """Policies of a step: a name, {name: ..., and its options}, or a sequence of steps.

    Args:
        option: what messages are to call it.

    Raises:
        ValueError: as `rank_policies`.
    """
    if isinstance(step, str):
        step = {"name": step}
    if not isinstance(step, dict) or not isinstance(step.get("name"), str | PolicyName):
        raise ValueError(f"{option}={step!r} is neither a policy's name nor {{name:<policy>,<option>:<value>}}")
    settings = dict(step)
    name = settings.pop("name")
    name = name.name if isinstance(name, PolicyName) else name
    if name == PolicyName.sequence.name:
        steps = settings.pop("steps", None)
        if not isinstance(steps, list) or not steps or settings:
            raise ValueError(f"{option}=sequence needs steps and nothing else, such as policy.steps=[pyramidinfer,h2o]")
        found = [policy for each in steps for policy in policies_of(each, f"{option}.steps")]
        if sum(type(policy).carry is not Policy.carry for policy in found) > 1:
            raise ValueError(f"{option}.steps has more than one policy that accumulates votes; use one of them")
        return found
    if name not in POLICIES:
        raise ValueError(f"{option}={name} is not one of {', '.join([*POLICIES, PolicyName.sequence.name])}")
    known = [field.name for field in fields(POLICIES[name]) if field.init]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            has = f"it has {', '.join(known)}" if known else "it has no options"
            raise ValueError(f"{option}: {name} has no option {setting}; {has}")
    try:
        return [] if name == PolicyName.full.name else [POLICIES[name](**settings)]
    except TypeError as error:
        raise ValueError(f"{option}: {name} cannot be made of {settings}: {error}") from error
