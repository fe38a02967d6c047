"""CAKE: one budget for all layers, shared out by entropy and variance of their attention, in a cascade."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from policies.cake import CAKE
from policies.snapkv import SnapKV
from runahead import Ranks
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import build, prompt, throughout
from tests.policies.running import Run, prompts, require_decides_once, require_no_other_decides
from tests.policies.test_adakv import kept_by, model_with
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

BUDGET, WINDOW, KERNEL, GAMMA, HEADS, LAYERS = 14, 4, 3, 50.0, 2, 3
LENGTHS = (60, 41, 9)
OPTIONS = {"budget": BUDGET, "window": WINDOW, "kernel": KERNEL, "gamma": GAMMA, "tau1": 1.3, "tau2": 0.7}
POLICY = CAKE(**OPTIONS)  # type: ignore[arg-type]


def by_hand(ids: list[int], budget: int = BUDGET, num_layers: int = LAYERS) -> list[list[list[int]]]:
    """Positions that each KV head of the first layers keeps, from whole matrices of transformers' eager attention."""
    module = build("llama", num_key_value_heads=HEADS)
    module.set_attn_implementation("eager")
    with torch.inference_mode(), throughout(torch.float64):
        attentions = module(torch.tensor([ids]), output_attentions=True).attentions
    num_tokens, needs, scores = len(ids), list[float](), list[Tensor]()
    for attention_1NSS in attentions[:num_layers]:
        window_NwP = attention_1NSS[0, :, -WINDOW:, :-WINDOW].double()
        entropy = -(window_NwP * window_NwP.clamp_min(1e-300).log()).sum()
        variance_NP = window_NwP.var(dim=1)
        needs.append(float(entropy ** (1 / 1.3) * variance_NP.sum() ** (1 / 0.7)))
        score_NP = window_NwP.mean(dim=1) + GAMMA * variance_NP
        padded = torch.nn.functional.pad(score_NP, (1, 1))
        pooled_NP = torch.stack([padded[:, i : i + num_tokens - WINDOW] for i in range(KERNEL)]).mean(dim=0)
        scores.append(pooled_NP.unflatten(0, (HEADS, -1)).mean(dim=1))
    room, left = num_tokens - WINDOW, float((budget - WINDOW) * LAYERS)
    shares, open_layers = [0.0] * num_layers, set(range(num_layers))
    while open_layers:  # who would get more than there is gets all, and the others share the rest
        total = sum(needs[layer] for layer in open_layers)
        full = {layer for layer in open_layers if left * needs[layer] / total >= room}
        for layer in full or set(open_layers):
            shares[layer] = room if full else left * needs[layer] / total
        left -= room * len(full)
        open_layers = open_layers - full if full else set()
    window = list(range(num_tokens - WINDOW, num_tokens))
    return [
        [sorted(head_P.argsort(descending=True)[: math.floor(share)].tolist()) + window for head_P in score_KP]
        for share, score_KP in zip(shares, scores, strict=True)
    ]


def kept(run: Run, row: int = 0) -> list[list[list[int]]]:
    return [kept_by(run, layer, row) for layer in range(LAYERS)]


def test_each_layer_keeps_what_whole_matrices_say() -> None:
    """Alone, in a padded batch, in pieces; each of the terms counts."""
    model, ids = model_with(HEADS), prompts(LENGTHS)
    expected = [by_hand(row) for row in ids[:2]]
    together = Run(model, [POLICY], ids)
    together.prefill()
    for row, ids_S in enumerate(ids[:2]):
        alone, pieces = Run(model, [POLICY], [ids_S]), Run(model, [POLICY], [ids_S])
        alone.prefill(), pieces.prefill([21, len(ids_S) - 27, 6])
        assert kept(alone) == kept(pieces) == kept(together, row) == expected[row]
        assert len({len(heads[0]) for heads in expected[row]}) == LAYERS, "else nothing was shared out"
    assert kept(together, 2) == [[list(range(9))] * HEADS] * LAYERS
    for wrong in ({"gamma": 0.0}, {"tau1": 0.6}, {"tau2": 1.3}, {"kernel": 1}, {"window": WINDOW + 1}):
        other = Run(model, [CAKE(**{**OPTIONS, **wrong})], [ids[0]])  # type: ignore[arg-type]
        other.prefill()
        assert kept(other) != expected[0], wrong


def test_the_layers_so_far_share_the_whole_budget_and_never_store_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer keeps after each later one: never less than in the end, and all together never above the budget."""
    seen = list[list[int]]()
    run = Run(model_with(HEADS), [POLICY], [prompt(60)])
    close = type(run.kept).close

    def closed(self: object, layer: int, *, room: int) -> None:
        seen.append([each.num_slots for each in run.kept.layers[: layer + 1]])
        close(run.kept, layer, room=room)

    monkeypatch.setattr(type(run.kept), "close", closed)
    run.prefill()
    assert len(seen) == LAYERS
    for layer, slots in enumerate(seen):
        assert slots == [len(heads[0]) for heads in by_hand(prompt(60), num_layers=layer + 1)]
        assert sum(slots) <= min(BUDGET * LAYERS, 60 * (layer + 1))
    for earlier, later in itertools.pairwise(seen):
        assert all(a >= b for a, b in zip(earlier, later, strict=False))
    assert seen[0][0] > seen[-1][0]
    assert all(layer.carried == {} for layer in run.kept.layers)


def test_equal_needs_are_snapkv_by_mean_and_variance() -> None:
    """Huge exponents' roots make all needs 1; without the variance it then is SnapKV, token by token."""
    ids = prompts(LENGTHS)
    equal = CAKE(budget=BUDGET, window=WINDOW, kernel=KERNEL, gamma=0, tau1=1e12, tau2=1e12)
    ours = Run(model_with(HEADS), [equal], ids)
    theirs = Run(model_with(HEADS), [SnapKV(budget=BUDGET, window=WINDOW, kernel=KERNEL, pooling="avg")], ids)  # type: ignore[arg-type]
    ours.prefill(), theirs.prefill()
    assert [kept(ours, row) for row in range(3)] == [kept(theirs, row) for row in range(3)]


@pytest.mark.parametrize("bounds", [(0, 37, 60), (0, 20, 20, 60)])
def test_a_chain_keeps_what_one_rank_keeps(rank_pools: RankPools, bounds: tuple[int, ...]) -> None:
    ids, policies = prompt(60), RankPolicies.everywhere([POLICY])
    expected = Run(tiny_model("llama"), [POLICY], [ids])
    logits_BV = expected.prefill()
    num_kept = [len(heads[0]) for heads in kept(expected)]
    batch = rank_pools.run(len(bounds) - 1, policy_tasks.generate, "llama", [ids], bounds, policies, 4, None)[-1]
    assert batch.ranks[-1].kept_tokens == num_kept
    tokens = list[int]()
    for _ in range(4):
        tokens.append(int(logits_BV[0].argmax()))
        logits_BV = expected.decode(tokens[-1])
    assert batch.generations[0].new_token_ids == tokens


def test_the_engine_and_a_conversation_decide_once(ranks: Ranks) -> None:
    require_decides_once(ranks, tiny_model("llama"), POLICY, LENGTHS, WINDOW + 1, BUDGET * LAYERS)


def test_what_cannot_be_is_refused() -> None:
    require_no_other_decides(POLICY)
    for option, value in (("window", 1), ("gamma", -1.0), ("tau1", 0.0), ("tau2", -1.0)):
        with pytest.raises(ValueError, match=f"policy.{option}={value} must"):
            CAKE(**{option: value})  # type: ignore[arg-type]
