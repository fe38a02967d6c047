"""An option of a policy that has no effect beside its others is refused, in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from enum import Enum
from typing import Any

import pytest
import torch

from policies import POLICIES
from policies.base import Policy
from policies.h2o import H2O
from policies.infllm import InfLLM
from policies.options import as_given
from policies.quest import Quest
from policies.retriever import Retriever
from policies.shadowkv import ShadowKV
from policies.window import Window
from policies.wrapper import Wrapper
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt
from tests.policies import test_matrix, test_retrieval
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.running import STREAMING
from tests.ranks.tasks import tiny_model

BY_SURPRISE = {"events": {"by": "surprise"}}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("infllm", BY_SURPRISE | {"block": 64}, "block=64 .* with policy.events.by=surprise; use policy.events.most"),
        ("em_llm", {"block": 64}, "block=64 has no effect with policy.events.by=surprise; use policy.events.most"),
        ("quest", BY_SURPRISE | {"page": 8}, "page=8 has no effect with policy.events.by=surprise; use"),
        ("infinigen", {"fetch": 64, "alpha": 2.0}, "alpha=2.0 has no effect with policy.fetch=64"),
        ("infinigen", {"fetch": 64, "max_fetch": 0.5}, "max_fetch=0.5 has no effect with policy.fetch=64"),
        ("infinigen", {"ahead": False, "first_ahead": 1}, "first_ahead=1 has no effect with policy.ahead=false"),
        ("squeezed_attention", {"fetch": 128, "quantile": 0.5}, "quantile=0.5 has no effect with policy.fetch=128"),
        ("squeezed_attention", {"fetch": 128, "max_fetch": 0.5}, "max_fetch=0.5 has no effect with policy.fetch=128"),
        ("squeezed_attention", {"coarse_quantile": 0.4}, "coarse_quantile=0.4 has no effect without policy.coarse"),
        ("offload", {"fetch": 64}, "fetch=64 has no effect with offload, which fetches all tokens"),
        ("offload", {"group": "max"}, "policy.group=max has no effect with offload"),
        (
            "infllm",
            {"events": {"refine": "modularity"}},
            "refine=modularity has no effect .*; use none, or policy.even",
        ),
        ("offload", {"recent": 64}, "recent=64 has no effect with offload"),
        ("window", {"recent": 8}, "recent=8 has no effect with window, which keeps the last tokens anyway"),
        ("streaming_llm", {"recent": 8}, "recent=8 has no effect with streaming_llm"),
        ("snapkv", {"recent": 8}, "recent=8 has no effect with policy.window=32, which stays anyway; leave it out, or"),
        ("cake", {"recent": 32}, "recent=32 has no effect with policy.window=32"),
        ("snapkv", {"evict_every": 4}, "evict_every=4 has no effect with snapkv, which keeps all generated tokens"),
        ("cake", {"evict_every": 4}, "evict_every=4 has no effect with cake"),
        ("em_llm", {"late": 0.5}, "late=0.5 does not go with em_llm, which chooses for all heads together"),
        ("adakv", {"scorer": H2O(evict_every=4)}, "policy.scorer.evict_every=4 has no effect with adakv"),
        ("chunkkv", {"pooling": "avg"}, "policy.pooling=avg has no effect with policy.kernel=1"),
        ("pyramidinfer", {"cosine_start": 0.8}, "cosine_start=0.8 has no effect without policy.schedule=cosine"),
        ("pyramidinfer", {"schedule": "cosine", "mean_keep": 0.5}, "mean_keep=0.5 has no effect with policy.schedule"),
        ("pyramidinfer", {"top_p": 0.5}, "top_p=0.5 has no effect without policy.select=top_p"),
        ("pyramidinfer", {"decay": 0.5}, "decay=0.5 has no effect without policy.select=top_p"),
        ("razor_attention", {"recent": 64, "least_recent": 99}, "least_recent=99 has no effect with policy.recent=64"),
        ("kvzap", {"threshold": 0.5, "budget": 64}, "budget=64 has no effect with policy.threshold=0.5"),
        ("keyformer", {"noise": False, "seed": 3}, "seed=3 has no effect with policy.noise=false"),
    ],
)
def test_an_option_without_effect_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        (MadeUpKVzap if name == "kvzap" else POLICIES[name])(**options)
    assert "\n" not in str(error.value)


class OfFile(Window):
    """A policy that a user's file defines has no name on the command line."""


def test_a_policy_of_a_file_is_told_by_its_class() -> None:
    with pytest.raises(ValueError, match="recent=8 has no effect with OfFile, which keeps the last tokens anyway"):
        OfFile(recent=8)


def test_options_that_have_an_effect_there_are_taken() -> None:
    taken: list[tuple[str, dict[str, Any]]] = [
        ("em_llm", {"events": {"by": "size", "refine": "none"}, "block": 64}),
        ("infinigen", {"alpha": 2.0, "max_fetch": 0.5}),
        ("infinigen", {"first_ahead": 1}),  # which a GPU has
        ("offload", {"recent": 64, "pool": {"bytes": "1GiB"}}),  # these are never replaced
        ("r_kv", {"evict_every": 4}),
        ("razor_attention", {"recent": 0.1, "least_recent": 99}),
        ("snapkv", {"pooling": "avg"}),
        ("pyramidinfer", {"schedule": "cosine", "cosine_start": 0.8}),
    ]
    for name, options in taken:
        assert POLICIES[name](**options)
    assert MadeUpKVzap(threshold=0.0, recent=2000)  # more than a budget that does not count


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_holds_what_it_was_given(name: str) -> None:
    """An option that is refused is said to be; none is another value without a word."""
    for each in fields(POLICIES[name]) if name != "full" else []:
        for value in others(each):
            try:
                policy = made(name, {each.name: value})
            except ValueError:
                continue
            assert getattr(policy, each.name) == value, each.name


NOT_READ = {
    "offload": {"sample_every"},  # on a CPU nothing is fetched
    "razor_attention": {"induction_share", "echo_share"},  # here heads are made up
    "duo_attention": {"retrieval_share"},
}
"""Options of policies that these runs do not read, though they have an effect."""
GIVEN = {"fetch": 10, "late": 0.5, "budget": 24, "threshold": 0.0, "coarse": 3, "ahead": False}
"""Values of options that are None or 0 by default and switch something on."""
NAMES = [name for name, kind in POLICIES.items() if name not in ("full", "minicache") and not kind.follows_marks]


BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("infllm", "events"): {"block": InfLLM.block},
    ("quest", "events"): {"page": Quest.page},
    ("shadowkv", "events"): {"page": ShadowKV.page},
    ("infinigen", "late"): {"ahead": False},
    ("retroinfer", "late"): {"estimate": 0.0},
    ("sparq", "late"): {"mean_value": False},
    ("squeezed_attention", "coarse"): {"fetch": None},
    ("chunkkv", "pooling"): {"kernel": 3},
}
"""Options of a policy beside an option that would be refused beside those of a short prompt."""
REFUSED = {
    "em_llm": {"late=0.5"},
    "infllm": {"late=0.5"},
    "magicpig": {"group=mean", "group=max", "group=sum", "late=0.5"},
    "offload": {"fetch=10", "group=mean", "group=max", "group=sum", "late=0.5"},
    "retrieval_attention": {"group=mean", "group=max", "group=sum"},
    "shadowkv": {"events={'by': 'surprise'}", "late=0.5"},
    "squeezed_attention": {"group=union", "group=sum"},
}
"""Switches that policies refuse here; the runs of all others are looked at."""


def made(name: str, options: dict[str, Any]) -> Any:
    """A policy for a short prompt, with these options in place of those that it has there."""
    kind = POLICIES[name]
    beside = {key: value for option in options for key, value in BESIDE.get((name, option), {}).items()}
    if issubclass(kind, Retriever):
        return test_retrieval.policy(name, test_retrieval.SOME[name] | beside | options)
    if issubclass(kind, Wrapper):
        return kind(**{"scorer": test_matrix.policy("snapkv")} | options)
    kind = {"kvzap": MadeUpKVzap}.get(name, STREAMING.get(name, kind))
    short = test_matrix.options_of(name) | beside | ({"recent": 9} if name in STREAMING else {})
    if test_matrix.has_budget(name) and name != "pyramidinfer" and "threshold" not in options:
        short["budget"] = 16
    return kind(**short | options)


def switches(kind: type) -> Iterator[dict[str, Any]]:
    """Options that change what a policy does altogether, each alone."""
    yield {}
    for each in fields(kind):
        if each.name == "events":
            yield BY_SURPRISE
        elif isinstance(each.default, Enum):
            yield from ({each.name: other} for other in type(each.default) if other is not each.default)
        elif isinstance(each.default, bool):
            yield {each.name: not each.default}
        elif each.name in GIVEN and each.default in (None, 0):
            yield {each.name: GIVEN[each.name]}
        elif each.name == "rank":
            yield {each.name: None}


def others(each: Field[Any]) -> list[Any]:
    """Values that an option may have in place of its default."""
    if isinstance(each.default, Enum):
        return [other for other in type(each.default) if other is not each.default]
    if isinstance(each.default, bool):
        return [not each.default]
    if isinstance(each.default, int):
        return [each.default + 1, each.default + 2]  # the width of a pooling is odd
    if isinstance(each.default, float):
        return [each.default * 0.9]
    return [GIVEN[each.name]] if each.name in GIVEN else []


def read_in_a_run(policy: Policy) -> set[str]:
    """Names of what is read of a policy in two turns and two answers."""
    read = set[str]()

    class Watched(type(policy)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    policy.__class__ = Watched
    conversation = Conversation(tiny_model("llama"), RankPolicies.everywhere([policy]))
    for turn in (prompt(40), prompt(5, seed=1)):
        conversation.feed(torch.tensor([turn]))
        conversation.follow(torch.tensor([[5, 7, 11, 13]]))
    return read


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_no_run_reads_is_refused(name: str) -> None:
    """With each switch of a policy, and no other one."""
    taken, refused = [], set()
    for switch in switches(POLICIES[name]):
        try:
            policy = made(name, switch)
        except ValueError:
            refused |= {f"{option}={as_given(value)}" for option, value in switch.items()}
            continue
        options = [each for each in fields(policy) if each.init]
        read = read_in_a_run(policy) | NOT_READ.get(name, set())
        for each in options:
            for value in others(each) if each.name not in read | set(switch) else []:
                try:
                    made(name, switch | {each.name: value})
                except ValueError:
                    continue
                taken.append((switch, each.name, value))
    assert not {option for _, option, _ in taken}, taken
    assert refused == REFUSED.get(name, set())
