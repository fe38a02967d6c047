"""What options of a policy ask for is held, or refused, or told where it depends on the prompt."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import pytest
import torch

from policies import POLICIES
from policies.exact_topk import ExactTopK
from policies.h2o import H2O
from policies.k_centers import KCenters
from policies.options import Budget
from policies.pyramidkv import PyramidKV
from policies.retriever import Retriever
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.window import Window
from runahead.config import GenerationOptions
from runahead.engine import Engine
from runahead.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt
from tests.policies.running import Run
from tests.policies.test_retrieval import INDEXED, SOME, Turns, policy
from tests.policies.test_unused_options import made
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 40
SCISSORS = [(0.1, 8), (0.25, 9), (0.5, 13), (0.9, 61), (0.99, 601)]
"""Shares that are dropped at once, and the least budgets of which they leave 7 tokens, found one by one."""


def options_of(name: str) -> set[str]:
    return {each.name for each in fields(POLICIES[name])} if name != "full" else set()


KEEPING = [
    name
    for name, kind in POLICIES.items()
    if {"budget", "sinks", "recent"} <= options_of(name) and not issubclass(kind, Retriever)
]
NUMBERS: list[Budget] = [6, 12, 20]
SHARES: list[Budget] = [0.15, 0.3, 0.5]


def cases(budgets: list[Budget], name: str) -> list[dict[str, Any]]:
    return [
        {name: budget, "sinks": sinks, "recent": recent}
        for budget, sinks, recent in product(budgets, (0, 2, 7), (0, 3, 9))
    ]


def held(options: dict[str, Any], chosen: Any) -> bool:
    """Whether each head of each layer has all first and last tokens that were asked for, after a prompt."""
    run = Run(tiny_model("llama"), [chosen], [prompt(NUM_TOKENS)])
    run.prefill()
    kept = [
        set(of_head) for layer in run.kept.layers for [*heads] in layer.positions_BKn().tolist() for of_head in heads
    ]
    budget = options["budget"]
    budget = budget if isinstance(budget, int) else round(budget * NUM_TOKENS)
    recent = max(options["recent"], chosen.recent_of(budget) if hasattr(chosen, "recent_of") else 0)
    ends = {*range(options["sinks"]), *range(NUM_TOKENS - recent, NUM_TOKENS)}
    assert abs(sum(len(each - {-1}) for each in kept) / len(kept) - budget) < 1  # each layer's number is rounded
    return all(ends <= each for each in kept)


@pytest.mark.parametrize("name", KEEPING)
def test_a_budget_has_room_for_what_always_stays_or_is_refused(name: str) -> None:
    taken = 0
    for options in cases(NUMBERS, "budget"):
        try:
            chosen = made(name, options)
        except ValueError as error:
            assert "no room for" in str(error) or "has no effect" in str(error), error
            continue
        assert held(options, chosen), options
        taken += 1
    assert taken


@pytest.mark.parametrize("name", KEEPING)
def test_a_share_without_room_for_what_always_stays_is_told(name: str) -> None:
    told = set()
    for options in cases(SHARES, "budget"):
        try:
            chosen = made(name, options)
        except ValueError as error:
            assert "has no effect" in str(error), error
            continue
        has_room = not chosen.no_room(NUM_TOKENS)
        is_held = held(options, chosen)
        assert is_held or not has_room, options
        assert name == "scissorhands" or is_held is has_room, options  # it cuts deeper while decoding
        told.add(has_room)
    assert told == {True, False}


@pytest.mark.parametrize("name", INDEXED)
def test_as_many_tokens_are_fetched_as_asked_or_it_is_told(name: str) -> None:
    """With pages and blocks of one token, of which no more are read than there is room for."""
    for options in cases([2, 6, 12], "fetch") + cases([0.05, 0.15, 0.3], "fetch"):
        alone = {"page": 1, "outliers": 0} if name == "shadowkv" else {"page": 1} if name == "quest" else {}
        try:
            chosen = policy(name, SOME[name] | alone | options)
        except ValueError as error:
            assert options["sinks"] + options["recent"] > options["fetch"] and "has no room for" in str(error)
            continue
        turns = Turns(tiny_model("llama"), [chosen])
        turns.prefill()
        turns.decode([5])
        layer = turns.retrieval.layers[-1]
        assert layer is not None
        fetch = options["fetch"]
        asked = fetch if isinstance(fetch, int) else round(fetch * NUM_TOKENS)
        more = layer.fetched - asked - (len(alone) > 0)  # pages may have one more, for the padding of a row
        assert (more > 0) is bool(chosen.no_room(NUM_TOKENS)), (options, layer.fetched)


def test_pages_of_one_token_with_no_sinks_are_the_tokens_with_the_best_scores() -> None:
    """Seen to fail: the first token was always read, too."""
    found = []
    for name, more in (("exact_topk", {}), ("quest", {"page": 1, "digest": "mean"})):
        turns = Turns(tiny_model("llama"), [policy(name, SOME[name] | more | {"fetch": 3, "sinks": 0, "recent": 0})])
        turns.prefill()
        found.append(turns.decode([5, 7, 11]))
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize(
    ("kind", "options", "least"),
    [
        (SnapKV, {"window": 8, "sinks": 3}, 11),
        (PyramidKV, {"window": 8, "sinks": 3, "beta": 4.0}, 19),
        (PyramidKV, {"window": 8, "sinks": 3, "beta": 1.5}, 12),
        (H2O, {"sinks": 3, "recent_share": 0.7}, 9),
        (H2O, {"sinks": 3, "recent": 9}, 12),
        (KCenters, {"sinks": 7, "recent_share": 0.0}, 7),
        *((Scissorhands, {"sinks": 3, "recent": 4, "drop_share": share}, least) for share, least in SCISSORS),
    ],
)
def test_the_least_budget_that_is_named_is_the_least(kind: type[Any], options: dict[str, Any], least: int) -> None:
    kind(budget=least, **options)
    with pytest.raises(ValueError, match=f"policy.budget={least - 1} has no room for .*; use at least {least}$"):
        kind(budget=least - 1, **options)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        *(("pyramidkv", {"beta": beta}, f"beta={beta} must be at least 1") for beta in (0, -1, float("nan"))),
        ("cake", {"budget": 1, "window": 1, "sinks": 3}, "window=1 must be at least 2"),
        ("window", {"recent": 2000}, "recent=2000 has no effect with window"),
        ("em_llm", {"fetch": 64, "group": 5}, "group=5 is not one of"),
        ("infllm", {"fetch": 64, "recent": 0}, "recent=0 must be at least 1"),
    ],
)
def test_options_that_are_out_of_range_are_told_before_room_for_them(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=f"^policy.{says}"):
        POLICIES[name](**options)


@pytest.mark.parametrize(
    ("name", "options", "stay"),
    [
        ("h2o", {"recent_share": 1.0}, "policy.recent_share=1.0"),
        ("pyramidkv", {"beta": float("inf")}, "policy.window=32 in the last layer, which policy.beta=inf gives least"),
    ],
)
def test_where_no_budget_has_room_this_is_told(name: str, options: dict[str, Any], stay: str) -> None:
    says = f"^policy.budget=1024 has no room for policy.sinks=2 and {stay}; no budget has, so change one of these"
    with pytest.raises(ValueError, match=says):
        POLICIES[name](sinks=2, **options)


@dataclass(kw_only=True)
class ByTable(Window):
    """A user's policy that knows how many tokens stay of some budgets alone."""

    def recent_of(self, num_kept: int) -> int:
        return {8: 3, 20: 5}[num_kept]


def test_other_budgets_than_the_given_one_matter_only_if_it_is_refused() -> None:
    ByTable(budget=8)
    assert not ByTable(budget=0.5).no_room(40)


@pytest.mark.parametrize(("min_tokens", "retrieves"), [(None, False), (101, False), (0, True)])
def test_a_share_to_fetch_is_told_of_only_where_it_was_fetched(
    ranks: Ranks, min_tokens: int | None, retrieves: bool
) -> None:
    """On a CPU the default is 2,048 tokens, of which the policy does not know."""
    policies = RankPolicies.everywhere([ExactTopK(min_tokens=min_tokens)])
    options = GenerationOptions(max_new_tokens=3, ignore_eos=True)
    batch = Engine(tiny_model("llama"), ranks, policies=policies).generate([prompt(96)], options)
    assert batch.ranks[0].retrieval is not None
    assert (batch.ranks[0].retrieval.mean_fetched_share is not None) is retrieves
    stays = "no room for policy.sinks=4 and policy.recent=16, which are fetched anyway"
    assert batch.no_room == ([f"policy.fetch=0.1 is 10 of 96 tokens, with {stays}"] if retrieves else [])


@pytest.mark.parametrize("kind", [H2O, KCenters])
def test_recent_tokens_are_a_number_or_a_share(kind: type[Any]) -> None:
    assert kind(budget=100).recent_of(100) == 50 and kind(budget=100, recent=9).recent_of(100) == 9
    with pytest.raises(ValueError, match="recent_share=0.3 has no effect with policy.recent=9, .*; leave one of them"):
        kind(recent=9, recent_share=0.3)
