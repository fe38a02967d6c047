"""Facts that cache policies decide: those of a run, and those by which drafts are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from runahead.config import Positions
from runahead.features.facts.made import Fact, Words, if_, known, of_last
from runahead.features.setup import Setup


def named(policy: Any) -> str:
    return "" if policy is None else policy.label


def _first(policies: Iterable[Any], holds: Callable[[Any], Any]) -> str:
    """The first of some policies for which something holds; "" if it holds for none."""
    return named(next(filter(holds, policies), None))


def of_both(words: Callable[[Any], str]) -> Fact:
    """Something about the policies of both places, whichever is asked of."""
    return known("policies", words)


def of_retriever(words: Callable[[Any], str]) -> Fact:
    """Something about the policy that retrieves at the place that is asked of."""

    def fact(setup: Setup) -> Words:
        if setup.policies is None:
            return None
        return "" if setup.retriever is None else words(setup.retriever)

    return fact


def first_step(holds: Callable[[Any], Any]) -> Fact:
    """The first policy for which something holds, at the place that is asked of."""
    return lambda setup: None if setup.policies is None else _first(setup.steps, holds)


def _drafting(holds: Callable[[Any], Any]) -> Fact:
    """The last of the policies that choose what drafts are made of, if something holds for these.

    They are asked about whatever `Setup.place` is, which is a place in the policies of the run.
    """

    def fact(setup: Setup) -> Words:
        policies = setup.drafting
        if not hasattr(policies, "last") or not holds(policies):
            return ""
        steps = policies.last or policies.others
        return named(steps[-1]) if steps else "full"

    return fact


def _name_of_a_policy(setup: Setup) -> Words:
    if setup.policy is not None:
        return setup.policy
    return None if setup.policies is None else next((f"policy {named(step)}" for step in setup.steps), "")


def _any_policy(setup: Setup) -> Words:
    if setup.policy is not None:
        return if_(setup.policy, "cache policies")
    return None if setup.policies is None else if_(setup.policies.chooses, "cache policies")


def _compares_by_kv_head(setup: Setup) -> Words:
    """A policy that decides by what all query heads of a KV head attend to.

    Those that vote with all heads of the model do, once another has chosen by head (`LayerView.over_heads`).
    """
    alike = all(step.chooses_alike for step in setup.steps if not step.retrieves)
    return first_step(lambda step: step.compares_by_kv_head or (step.votes_over_heads and not alike))(setup)


def _drops_tokens(setup: Setup) -> Words:
    """A policy that does not keep all tokens, as the user named it."""
    name, retrieve = first_step(lambda step: not step.retrieves)(setup), setup.options.get("policy.retrieve")
    return name and (f"policy {name}" if retrieve is None else f"policy.retrieve={retrieve}")


def _comes_twice(setup: Setup) -> Words:
    """A policy that is in a sequence twice, with the same options."""
    steps = list(setup.steps)
    return named(next((step for place, step in enumerate(steps) if step in steps[:place]), None))


OF_POLICIES: dict[str, Fact] = {
    # of the policies of both places
    "cache policies": _any_policy,
    "cache policies or cache.bits": of_both(lambda policies: if_(policies, "cache policies or cache.bits")),
    "policy.positions=reencoded": of_both(
        lambda policies: if_(policies and policies.positions is Positions.reencoded, "policy.positions=reencoded")
    ),
    "a policy that needs the whole prompt": of_both(lambda policies: if_(policies.needs_whole, "this policy")),
    "a policy of earlier ranks that narrows": of_last(
        of_both(lambda policies: _first(policies.others, lambda policy: policy.narrows))
    ),
    # of the policies of the rank that decodes
    "a policy that decides on each token": of_last(
        first_step(lambda step: not step.retrieves and (step.while_decoding or step.carries_generated))
    ),
    "a policy that decides on the whole prompt": of_last(of_both(lambda policies: named(policies.deciding))),
    "no policy of streaming heads alone": of_last(
        of_both(lambda policies: if_([each.streams for each in policies.last] != [True], "no policy of such heads"))
    ),
    "a policy that repeats the prompt": of_last(
        of_both(lambda policies: _first(policies.last, lambda policy: policy.replay is not None))
    ),
    "a policy that merges layers": of_last(of_both(lambda policies: named(policies.merging))),
    "a policy that needs all tokens of a prompt": of_last(
        first_step(lambda step: not step.retrieves and step.last_queries is None)
    ),
    "a policy that needs attention inputs of each token": of_last(
        first_step(lambda step: step.needs_attention_input and step.replay is None)
    ),
    # of the policies at the place that is asked of, which is each in turn
    "a policy": _name_of_a_policy,
    "a retrieving policy": of_retriever(named),
    "policy.clamped=true": of_retriever(lambda policy: if_(policy.clamps, "policy.clamped=true")),
    "policy.pool.bytes": of_retriever(
        lambda policy: if_(policy.pool.bytes is not None, f"policy.pool.bytes={policy.pool.bytes}")
    ),
    "policy.events.by=surprise": of_retriever(lambda policy: if_(policy.needs_surprise, "policy.events.by=surprise")),
    "policy.events.refine": of_retriever(lambda policy: if_(policy.compares_layers, "policy.events.refine=modularity")),
    "a policy that follows marks": first_step(lambda step: step.follows_marks),
    "a policy that follows no marks": first_step(lambda step: not step.follows_marks),
    "a policy that drops tokens": _drops_tokens,
    "a policy that narrows": first_step(lambda step: step.narrows),
    "a policy that narrows, retrieves or merges layers": first_step(
        lambda step: step.narrows or step.retrieves or step.merges_layers
    ),
    "a policy that narrows later": lambda setup: _first(setup.steps[1:], lambda step: step.narrows),
    "a policy that compares by KV head": _compares_by_kv_head,
    "a policy that turns queries": first_step(lambda step: step.queries_from is not None),
    "a policy that needs output projections": first_step(lambda step: step.needs_output_projection),
    "a policy that needs attention inputs": first_step(lambda step: step.needs_attention_input),
    "a sequence": lambda setup: if_(len(setup.steps) > 1, named(setup.steps[0]) if setup.steps else ""),
    "a policy twice": _comes_twice,
    "unequal heads": first_step(lambda step: step.keeps_ragged),
    "unequal heads, decided on the whole prompt": first_step(
        lambda step: step.keeps_ragged and (step.decides_on_all or step.replay is not None)
    ),
    "unequal heads, compensated": first_step(lambda step: step.keeps_ragged and step.compensates),
    "a step after one that retrieves": lambda setup: named(
        next((step for before, step in zip(setup.steps, setup.steps[1:], strict=False) if before.retrieves), None)
    ),
    # of drafting policies
    "drafts by a retrieving policy after others": _drafting(
        lambda policies: policies.retriever is not None and len(policies.last) > 1
    ),
    "drafts by policy.late or policy.pool": _drafting(
        lambda policies: (
            policies.retriever is not None
            and (policies.retriever.late is not None or policies.retriever.pool.bytes is not None)
        )
    ),
    "drafts by policy.events.by=surprise": _drafting(lambda policies: policies.needs_surprise),
    "drafts by policy.clamped=true": _drafting(lambda policies: policies.clamped_to is not None),
    "drafts by a policy that narrows": _drafting(lambda policies: any(policy.narrows for policy in policies.last)),
    "drafts by a policy that decides on layers together": _drafting(
        lambda policies: any(
            step.decides_on_all or step.replay is not None or step.merges_layers
            for step in (*policies.last, *policies.others)
        )
    ),
    "drafts by policy.positions=reencoded": _drafting(lambda policies: policies.positions is Positions.reencoded),
}
