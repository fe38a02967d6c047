"""ZigZagKV: one budget for all layers, shared out by how many tokens hold most of the votes of each head."""

from __future__ import annotations

import pytest
import torch

from policies.criticalkv import CriticalKV
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from policies.zigzagkv import ZigZagKV, proportional_shares
from runahead import Ranks
from runahead.cache.kept import KeptLayer
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.policies.running import Run, prompts, require_decides_once, require_no_other_decides
from tests.policies.test_adakv import kept_by, model_with
from tests.ranks.tasks import tiny_model

BUDGET, WINDOW, LAYERS, HEADS = 12, 4, 3, 4
LENGTHS = (40, 31, 9)
ZIGZAG = ZigZagKV(budget=BUDGET, window=WINDOW, kernel=3, sinks=1)
GENERATED = [5, 7, 11, 13]


def test_budgets_of_all_layers_and_heads_add_up() -> None:
    """In each row, whatever they are; sinks and window stay in each head, and what is dropped is freed."""
    run, of_layers, total = Run(model_with(HEADS), [ZIGZAG], prompts(LENGTHS)), list[int](), 0
    run.prefill()
    for row, length in enumerate(LENGTHS):
        counts = []
        for layer in range(LAYERS):
            kept = kept_by(run, layer, row)
            for positions in kept:
                assert set(positions) >= {0, *range(length - WINDOW, length)} and positions == sorted(set(positions))
            counts.append(sum(map(len, kept)))
        assert sum(counts) == LAYERS * HEADS * min(BUDGET, length)
        of_layers += counts if length > BUDGET else []
        total += sum(counts)
    assert len(set(of_layers)) > 3  # else nothing was shared out
    assert all(isinstance(layer, RaggedLayer) for layer in run.kept.layers)
    per_token, places = 2 * 8 * 8 + 4, 4 * (2 * 3 * HEADS + 1) + 8 * 3 * HEADS
    assert run.kept.num_bytes == total * per_token + LAYERS * places  # the votes are gone, too


def test_budgets_are_in_proportion_to_the_tokens_that_hold_most_of_the_votes() -> None:
    """Votes of the heads are spread evenly over 10, 20, 30 and 60 of 100 tokens, 90% of which hold 90%."""
    votes_BKn = torch.zeros(4, 1, 100)
    for head, spread in enumerate((10, 20, 30, 60)):
        votes_BKn[head, 0, torch.randperm(96, generator=torch.Generator().manual_seed(head))[:spread]] = 1 / spread
    policy = ZigZagKV(budget=20, window=4, kernel=1, mass=0.895, least_share=0.2)
    slots = policy.keep_in_all([votes_BKn[:2].transpose(0, 1), votes_BKn[2:].transpose(0, 1)], 100)
    # 4 each, and of the other 64 the shares 9, 18, 27 and 54 of 108: 5 1/3, 10 2/3, 16 and 32.
    assert [(slots_BKm >= 0).sum(dim=-1).tolist() for slots_BKm in slots] == [[[9, 15]], [[20, 36]]]
    for slots_BKm, votes in zip(slots, votes_BKn.split(2), strict=True):
        for head_m, votes_n in zip(slots_BKm[0], votes[:, 0], strict=True):
            chosen = [slot for slot in head_m.tolist() if slot >= 0]
            assert chosen[-4:] == [96, 97, 98, 99]
            assert (votes_n[chosen[:-4]] > 0).sum() == min(len(chosen) - 4, (votes_n > 0).sum())


@pytest.mark.parametrize("options", [{"mass": 1e-9}, {"least_share": 1.0}], ids=["equal needs", "equal budgets"])
def test_where_all_heads_need_equally_many_it_is_snapkv(options: dict[str, float]) -> None:
    """Bit by bit. One token holds any head's first billionth of the votes."""
    zigzag = ZigZagKV(budget=BUDGET, window=WINDOW, kernel=3, sinks=1, **options)
    snapkv = SnapKV(budget=BUDGET, window=WINDOW, kernel=3, sinks=1)
    ours, theirs = (Run(model_with(HEADS), [policy], prompts(LENGTHS)) for policy in (zigzag, snapkv))
    assert torch.equal(ours.prefill(), theirs.prefill())
    for layer, other in zip(ours.kept.layers, theirs.kept.layers, strict=True):
        assert type(layer) is KeptLayer and torch.equal(layer.positions_BKn(), other.positions_BKn())
    for token in GENERATED:
        assert torch.equal(ours.decode(token), theirs.decode(token))


@pytest.mark.parametrize(
    ("weights", "total", "least", "most", "shares"),
    [
        ([1, 1, 2], 12, 0, 9, [3, 3, 6]),
        ([1, 1, 2], 13, 1, 9, [4, 3, 6]),  # the first of two equal remainders
        ([1, 1, 8], 12, 0, 6, [3, 3, 6]),  # what one has no room for goes to the others
        ([1, 2, 9], 18, 1, 6, [6, 6, 6]),
        ([5, 1], 2, 1, 6, [1, 1]),
    ],
)
def test_shares_are_in_proportion_as_far_as_there_is_room(
    weights: list[float], total: int, least: int, most: int, shares: list[int]
) -> None:
    assert proportional_shares(weights, total, least=least, most=most) == shares


def test_the_engine_and_a_conversation_decide_once(ranks: Ranks) -> None:
    require_decides_once(ranks, tiny_model("llama"), ZIGZAG, LENGTHS, WINDOW + 1, BUDGET * LAYERS)


def test_what_cannot_be_is_refused() -> None:
    with throughout(torch.float64), pytest.raises(ValueError, match="use policy.ranks.others=full"):
        RankPolicies(last=[ZIGZAG], others=[PyramidInfer()]).check(tiny_model("llama"))
    require_no_other_decides(ZIGZAG)
    with pytest.raises(ValueError, match="does not score by shares of attention"):
        CriticalKV(scorer=ZIGZAG)
    for option, value in (("mass", 0.0), ("mass", 1.5), ("least_share", -0.1)):
        with pytest.raises(ValueError, match=f"policy.{option}={value} must be a share"):
            ZigZagKV(**{option: value})  # type: ignore[arg-type]
