"""Choices by the query before: one step late, but for the KV heads whose query has changed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from policies.retriever import Choice, Index, Slots
from policies.retroinfer import RetroInfer
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention
from tests.families import prompt, throughout
from tests.policies.test_retrieval import GENERATED, NUM_TOKENS, PADDED, SOME, Turns, policy
from tests.ranks.tasks import tiny_model

TOKENS = [*GENERATED, 17, 19]
PLAIN: dict[str, dict[str, Any]] = {
    name: SOME[name] | more
    for name, more in {
        "exact_topk": {},
        "quest": {},
        "clusterkv": {},
        "squeezed_attention": {},
        "infinigen": {"ahead": False},
        "sparq": {"mean_value": False},
        "retroinfer": {"estimate": 0.0},
    }.items()
}


@dataclass(kw_only=True)
class Mixed(ExactTopK):
    """Exact scores of the query before, or of the own one in KV heads with a mean cosine below a threshold."""

    least: float = 0.0

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        before_BNH, index.before_BNH = getattr(index, "before_BNH", q_BNH), q_BNH  # type: ignore[attr-defined]
        alike_BK = torch.cosine_similarity(q_BNH, before_BNH, dim=-1).unflatten(1, (2, -1)).mean(dim=2)
        is_own_BN = (alike_BK < self.least).repeat_interleave(q_BNH.shape[1] // 2, dim=1)
        return super().choose(index, torch.where(is_own_BN[..., None], q_BNH, before_BNH), slots)


def decoded(one: Policy, lengths: tuple[int, ...] = (NUM_TOKENS,)) -> Tensor:
    turns = Turns(tiny_model("llama"), [one], lengths)
    turns.prefill()
    return turns.decode(TOKENS)


@pytest.mark.parametrize("name", PLAIN)
def test_where_all_heads_choose_again_nothing_is_late(name: str) -> None:
    """Bit by bit; and without that something is."""
    own = decoded(policy(name, PLAIN[name]), PADDED)
    assert torch.equal(decoded(policy(name, PLAIN[name] | {"late": 1.0}), PADDED), own)
    late = decoded(policy(name, PLAIN[name] | {"late": -1.0}), PADDED)
    assert torch.equal(late[:, :1], own[:, :1])  # no query before it
    assert (late[:, 1:] - own[:, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
def test_heads_with_another_query_choose_by_their_own(lengths: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"min_tokens": 0, "fetch": 8, "sinks": 1, "recent": 1}
    seen = []
    for late in (-1.0, 0.1, 0.4, 1.0):
        seen.append(decoded(ExactTopK(**options, late=late), lengths))
        torch.testing.assert_close(seen[-1], decoded(Mixed(**options, least=late), lengths), atol=1e-9, rtol=0)
    assert all((one - other).abs().max() > 1e-3 for one, other in pairwise(seen))


@pytest.mark.parametrize(("late", "is_own"), [(1.0, True), (0.99, False)])
def test_at_1_even_a_query_of_the_same_direction_is_asked(late: float, is_own: bool) -> None:
    """Lengths of a group's queries decide, too, which of its heads need a token most."""
    options = SOME["exact_topk"]
    one, plain = (Turns(tiny_model("llama"), [policy("exact_topk", options | more)]) for more in ({"late": late}, {}))
    one.prefill(), plain.prefill()
    q_BNH = torch.randn(1, 4, one.model.kv_shapes[0].key_dim, dtype=torch.float64, generator=torch.manual_seed(3))
    before_BNH = q_BNH * torch.tensor([1.0, 4.0, 4.0, 1.0])[:, None]
    found = one.retrieval.layers[0]
    assert found is not None
    found.asked_BNH = before_BNH
    fetched = one.retrieval.fetched(0, q_BNH.unsqueeze(2), NUM_TOKENS, [0])
    own, late_one = (plain.retrieval.fetched(0, q.unsqueeze(2), NUM_TOKENS, [0]) for q in (q_BNH, before_BNH))
    slots = [None if each is None else each.slots_BKm for each in (fetched, own, late_one)]
    assert slots[0] is not None and slots[1] is not None and slots[2] is not None
    assert torch.equal(slots[0], slots[1] if is_own else slots[2]) and not torch.equal(slots[1], slots[2])


def test_a_fork_is_as_late_as_its_conversation() -> None:
    one, alone = (Turns(tiny_model("llama"), [policy("quest", SOME["quest"] | {"late": 0.3})]) for _ in range(2))
    one.prefill(), alone.prefill()
    one.decode(GENERATED), alone.decode(GENERATED)
    fork = one.conversation.fork()
    with throughout(torch.float64):
        theirs = fork.follow(torch.tensor([[17, 19]]))
    ours = one.decode([17, 19])
    assert torch.equal(ours, theirs) and torch.equal(ours, alone.decode([17, 19]))


def test_the_first_token_after_a_turn_chooses_for_itself() -> None:
    one = Turns(tiny_model("llama"), [policy("quest", SOME["quest"] | {"late": -1.0})])
    one.prefill()
    one.decode(GENERATED)
    found = one.retrieval.layers[0]
    assert found is not None and found.asked_BNH is not None
    steps = found.steps
    with throughout(torch.float64):
        one.conversation.feed(torch.tensor([prompt(3, seed=5)]))
        assert found.asked_BNH is None and found.steps == steps == len(GENERATED)
        one.decode([5])
    assert found.steps == steps + 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Quest, {"late": 1.5}, "policy.late=1.5 must be from -1 to 1"),
        (InfiniGen, {"late": 0.8}, "policy.late=0.8 is for a fixed number of slots .* policy.fetch is not given"),
        (InfiniGen, {"late": 0.8, "fetch": 64, "ahead": True}, "policy.ahead=true by a predicted one"),
        (SqueezedAttention, {"late": 0.8}, "policy.fetch is not given"),
        (Offload, {"late": 0.8}, "policy.late=0.8"),
        (SparQ, {"late": 0.8}, "attention of its own query is estimated"),
        (RetroInfer, {"late": 0.8}, "attention of its own query is estimated"),
        (ExactTopK, {"late": 0.8, "pool": {"bytes": "1MiB"}}, "does not go with policy.pool.bytes"),
    ],
)
def test_what_is_not_late_is_refused(kind: type[Policy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
