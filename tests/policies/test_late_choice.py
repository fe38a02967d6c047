"""Choices by the query before: one step late, but for the KV heads whose query has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
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
from runahead import Model
from tests.families import build, prompt, throughout
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


class MixedIndex(Index):
    """Index that chooses by the query before, and by the own one as its policy says."""

    before_BNH: Tensor | None = None

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        before_BNH, self.before_BNH = q_BNH if self.before_BNH is None else self.before_BNH, q_BNH
        alike_BK = torch.cosine_similarity(q_BNH, before_BNH, dim=-1).unflatten(1, (2, -1)).mean(dim=2)
        is_own_BN = (alike_BK < self.how.least).repeat_interleave(q_BNH.shape[1] // 2, dim=1)
        self.how.own.append(float(is_own_BN.double().mean()))
        return super().choose(torch.where(is_own_BN[..., None], q_BNH, before_BNH), slots)


@dataclass(kw_only=True)
class Mixed(ExactTopK):
    """Exact scores of the query before, or of the own one in KV heads with a mean cosine below a threshold.

    Attributes:
        own: share of the KV heads that choose by their own query, one number for each layer of each step.
    """

    index_class = MixedIndex

    least: float = 0.0
    own: list[float] = field(default_factory=list)


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
    """The report has their share, and it falls with the threshold; with the other heads counted this fails."""
    options: dict[str, Any] = {"min_tokens": 0, "fetch": 8, "sinks": 1, "recent": 1}
    seen, shares = [], []
    for late in (-1.0, 0.1, 0.4, 1.0):
        ours, mixed = ExactTopK(**options, late=late), Mixed(**options, least=late)
        turns = Turns(tiny_model("llama"), [ours], lengths)
        turns.prefill()
        seen.append(turns.decode(TOKENS))
        torch.testing.assert_close(seen[-1], decoded(mixed, lengths), atol=1e-9, rtol=0)
        report, num_layers = turns.retrieval.report(), turns.model.num_layers
        shares.append(report.mean_chosen_again)
        if late < 1:  # at 1 all of them choose again, whatever the cosine
            later_steps = mixed.own[num_layers:]  # the first token has no query before it
            assert report.chosen_again == pytest.approx([mean(later_steps[n::num_layers]) for n in range(num_layers)])
    assert all((one - other).abs().max() > 1e-3 for one, other in pairwise(seen))
    assert shares[0] == 0.0 < shares[1] < shares[2] < shares[3] == 1.0


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("late", [-1.0, 0.1, 1.0])
def test_a_late_choice_is_from_a_full_pool_as_it_is_then(late: float, victim: str) -> None:
    """And what a choice says of a token counts once, as it was corrected: so the same tokens are replaced. Seen to
    fail: the late choice counted in heads that choose again."""
    options: dict[str, Any] = {"min_tokens": 0, "fetch": 8, "sinks": 1, "recent": 1}
    size = 20 * 3 * tiny_model("llama").kv_shapes[0].bytes_per_token(len(PADDED))
    found = []
    options["pool"] = {"bytes": size, "victim": victim}
    # The prompt's last tokens, as which nothing was decoded, count as if they had chosen by their own queries.
    mixed = Mixed(**options, least=2.0)
    for one in (ExactTopK(**options, late=late), mixed):
        turns = Turns(tiny_model("llama"), [one], PADDED)
        turns.prefill()
        mixed.least = late if one is mixed else mixed.least
        for layer in turns.retrieval.layers:
            assert layer is not None
            vars(layer.index).pop("before_BNH", None)
        logits = turns.decode(TOKENS * 3)
        assert turns.retrieval.report().evicted == [NUM_TOKENS + len(TOKENS) * 3 - 20] * 3
        found.append((logits, [layer.positions_BKn() for layer in turns.conversation.cache.layers]))
    (ours, kept), (theirs, expected) = found
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert all(map(torch.equal, kept, expected))


def test_the_more_heads_choose_again_the_more_attention_is_seen() -> None:
    """With a query head per KV head its own best slots have most of its attention, so thresholds lie in between.

    It is so step by step in the first layer, whose queries no choice changes. With the other heads corrected it fails.
    """
    with throughout(torch.float64):
        model = Model(build("llama", num_key_value_heads=4))
    seen = []
    for late in (-1.0, 0.0, 0.2, 0.5, 1.0):
        turns = Turns(model, [ExactTopK(min_tokens=0, fetch=8, sinks=1, recent=1, late=late, sample_every=1)])
        turns.prefill(), turns.decode(TOKENS)
        found = turns.retrieval.layers[0]
        assert found is not None and len(found.hit_mass) == len(TOKENS)
        seen.append(found.hit_mass)
    for fewer, more in pairwise(seen):
        assert all(least <= most + 1e-12 for least, most in zip(fewer, more, strict=True))
        assert sum(fewer) < sum(more) - 1e-6


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
    fetched = one.retrieval.fetched(0, q_BNH.unsqueeze(2), NUM_TOKENS, [0], room=1)
    own, late_one = (plain.retrieval.fetched(0, q.unsqueeze(2), NUM_TOKENS, [0], room=1) for q in (q_BNH, before_BNH))
    slots = [None if each is None else each.slots_BKm for each in (fetched, own, late_one)]
    assert slots[0] is not None and slots[1] is not None and slots[2] is not None
    assert torch.equal(slots[0], slots[1] if is_own else slots[2]) and not torch.equal(slots[1], slots[2])


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
    ],
)
def test_what_is_not_late_is_refused(kind: type[Policy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)
