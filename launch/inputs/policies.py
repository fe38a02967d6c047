"""Policies from policy= options: one, several in sequence, different ones by rank, or one from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from launch.program.typed_options import merged_into, typed
from policies import POLICIES
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from runahead.config import CacheOptions, Positions, choice, not_one_of

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

for _name in NAMES:  # the choices of policy=, in place of a config file for each
    ConfigStore.instance().store(group="policy", name=_name, node={"name": _name})

PARTS = ("steps", "ranks", "last", "others", "scorer", "retrieve")
"""Options that are policies themselves, or lead to some."""


def options_of(name: str) -> type:
    """Dataclass whose fields are the options of a policy."""
    if name in COMBINED:
        return COMBINED[name]
    return _wrapper_options(name) if wraps(name) else POLICIES[name]


def wraps(name: str) -> bool:
    """Whether a policy chooses by the scores of another one, its `scorer`."""
    from policies.wrapper import Wrapper

    return name in POLICIES and issubclass(POLICIES[name], Wrapper)


@cache
def _wrapper_options(name: str) -> type:
    """The fields of a policy that wraps another, but for its `scorer`, which is a name or {name: ..., option: ...}."""
    kind, hints = POLICIES[name], get_type_hints(POLICIES[name])
    options: list[tuple[str, Any, Any]] = [
        (each.name, hints[each.name], field(default=each.default))
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name != "scorer"
    ]
    made = make_dataclass(kind.__name__, [("scorer", Any, field(default="snapkv")), *options], kw_only=True)
    made.__module__ = kind.__module__
    made.__doc__ = kind.__doc__
    return made


@contextmanager
def named(option: str) -> Iterator[None]:
    """Mistakes in this block name this option, such as draft.policy, in place of policy."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"(?<![\w.])policy(?=[.=:])", option, str(error))
        if message == str(error):
            raise
        raise ValueError(message) from error


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
        raise ValueError(f"policy={name} {not_one_of(name, NAMES)}")
    shared = {"name": name, "positions": positions.name}
    if not given:  # policy=full loads no policy's module, and so no torch
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


def rank_policies(
    policy: Mapping[str, Any], storage: CacheOptions | None = None, *, file_option: str = "policy"
) -> RankPolicies:
    """Policies of a run.

    Args:
        policy: name, positions and options, as `checked` returns them.
        storage: how what they keep is stored.
        file_option: as `policy_class` takes it.

    Raises:
        ValueError: in one line, for a value that a policy refuses or an option that it does not have.
    """
    from runahead.thinning.rank_policies import RankPolicies

    positions, storage = Positions[policy["positions"]], storage or CacheOptions()
    step = {option: value for option, value in policy.items() if option != "positions"}
    if step["name"] == "prompt_cache":  # reuses keys and values rather than thinning them out
        retrieve = prompt_cache_options(policy).retrieve or "full"
        return RankPolicies.everywhere(policies_of(retrieve, "policy.retrieve"), storage=storage)
    if step["name"] != "per_rank":
        return RankPolicies.everywhere(policies_of(step, "policy", file_option), positions, storage)
    places = step.get("ranks", {})
    last, others = places.get("last"), places.get("others")
    if last is None and others is None:
        raise ValueError("policy=per_rank needs policy.ranks.last=<policy> or policy.ranks.others=<policy>")
    return RankPolicies(
        positions=positions,
        storage=storage,
        last=policies_of(last or "full", "policy.ranks.last", file_option),
        others=policies_of(others or "full", "policy.ranks.others", file_option),
    )


def chooses(policy: Mapping[str, Any]) -> bool:
    """Whether cache policies run."""
    return not set(names_of(dict(policy))) <= {"full", "prompt_cache"}


def prompt_cache_options(policy: Mapping[str, Any]) -> PromptCacheOptions:
    """Options of policy=prompt_cache. Raises: ValueError."""
    settings = {option: value for option, value in policy.items() if option not in ("name", "positions")}
    return _made("prompt_cache", PromptCacheOptions, settings, "policy")


def policies_of(step: Any, option: str, file_option: str = "policy") -> list[Policy]:
    """Policies of a step: a name, {name: ..., and its options}, or a sequence of steps.

    Args:
        step: a name, {name: ..., option: ...}, or a sequence.
        option: name of the step in messages.
        file_option: as `policy_class` takes it.

    Raises:
        ValueError: as `rank_policies`.
    """
    from launch.inputs.policy_file import policy_class

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
        return [policy for each in steps for policy in policies_of(each, f"{option}.steps", file_option)]
    if name == "file":
        file = _made(name, FileOptions, settings, option)
        kind = policy_class(file.path, file_option)
        return [_made(kind.__name__, kind, file.options, option)]
    if wraps(name):
        from policies.scorer import Scorer
        from policies.wrapper import no_scorer

        values = vars(_made(name, options_of(name), settings, option))
        scorer = values["scorer"]
        if isinstance(scorer, dict):  # policy.scorer.budget=64 alone is of the default one
            scorer = {"name": options_of(name)().scorer} | scorer
        scorers = policies_of(scorer, f"{option}.scorer", file_option)
        if len(scorers) != 1 or not isinstance(scorers[0], Scorer):
            raise no_scorer(f"{option}.scorer={scorer}")
        return [POLICIES[name](**values | {"scorer": scorers[0]})]
    if name not in POLICIES:
        raise ValueError(f"{option}={name} {not_one_of(name, [*POLICIES, 'sequence', 'file'])}")
    policy = _made(name, POLICIES[name], settings, option)
    return [] if name == "full" else [policy]


def steps_of(step: Any) -> Iterator[Mapping[str, Any]]:
    """A policy and those that it is made of, its steps, places and scorer, with their options."""
    if isinstance(step, str):
        yield {"name": step}
    elif isinstance(step, Mapping):
        yield step
        for part in PARTS:
            yield from steps_of(step.get(part))
    elif isinstance(step, list):
        for each in step:
            yield from steps_of(each)


def names_of(step: Any) -> Iterator[str]:
    """Names of a policy and of those that it is made of."""
    return (each["name"] for each in steps_of(step) if isinstance(each.get("name"), str))


def _kind_of(step: Mapping[str, Any]) -> type[Policy]:
    """Class of a policy; `Policy` for one that is made of others, or of a file."""
    from policies.base import Policy

    return POLICIES.get(str(step.get("name")), Policy)


def clamps(step: Any) -> bool:
    """Whether a policy, or one that it is made of, clamps distances, and so stores keys before RoPE."""
    return any(each.get("clamped", getattr(_kind_of(each), "clamped", False)) for each in steps_of(step))


def _chooses_alike(step: Any) -> bool:
    """Whether a step keeps the same tokens in all KV heads."""
    return all(_kind_of(each).chooses_alike for each in steps_of(step) if "name" in each)


def ineffective_options(policy: Any, option: str = "policy", *, has_turns: bool = False) -> list[str]:
    """A sentence for each option of a policy that has no effect.

    Args:
        policy: name and options, as of a step.
        option: name of the policy in messages.
        has_turns: whether later turns follow a prompt, as in a `Conversation`.
    """
    sentences = []
    sequences = [step["steps"] for step in steps_of(policy) if isinstance(step.get("steps"), list)]
    after_choice_by_head = [step for steps in sequences for step in list(dropwhile(_chooses_alike, steps))[1:]]
    for step in steps_of(policy):
        # A prompt that a policy with clamped distances takes in chunks is indexed after each of them, as after a turn.
        if step.get("turn_tokens") and not has_turns and not clamps(step):
            sentences.append(f"{option}.turn_tokens has no effect here: only a Conversation in Python has later turns")
        for scorer in list(steps_of(step.get("scorer")))[:1]:
            kind, name = _kind_of(scorer), step.get("name")
            by_head = kind.votes_over_heads and step in after_choice_by_head
            if kind.chooses_alike and not by_head and _kind_of(step).keeps_ragged:
                sentences.append(
                    f"{option}={name} shares nothing out over {scorer['name']}, whose scores are the same in all KV "
                    "heads; use a scorer that tells heads apart, such as snapkv"
                )
    return sentences


def _made(name: str, kind: type[T], settings: Mapping[str, Any], option: str) -> T:
    _require_known(name, kind, settings, option)
    return typed(settings, kind, "policy")


def _option_inside(name: str, settings: Mapping[str, Any], setting: str, others: Sequence[str]) -> str | None:
    """The override by which a policy that a combined one is made of gets an option; None if none has it.

    Args:
        others: policies with that option.
    """
    value = settings[setting]
    if name == "file":
        return f"policy.options.{setting}={value}"
    if wraps(name):
        scorer = next(names_of(settings.get("scorer", options_of(name)().scorer)), None)
        if scorer not in others:
            return None
        is_named = isinstance(settings.get("scorer"), str)
        return (
            f"policy.scorer='{{name:{scorer},{setting}:{value}}}'" if is_named else f"policy.scorer.{setting}={value}"
        )
    example = next((f"{{name:{other},{setting}:{value}}}" for other in others if other in POLICIES), None)
    if example is None:
        return None
    return {"sequence": f"policy.steps='[{example}]'", "per_rank": f"policy.ranks.last='{example}'"}.get(name)


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
        if (inside := _option_inside(name, settings, setting, others)) is not None:
            raise ValueError(f"{option}: {name} has no option {setting}; use {inside}")
        if len(others) == 1 and others[0] not in POLICIES:
            raise ValueError(f"{option}: {name} has no option {setting}; add policy={others[0]}, which has it")
        has = f"it has {', '.join(known)}" if known else "it has no options"
        raise ValueError(f"{option}: {name} has no option {setting}; {has}")
