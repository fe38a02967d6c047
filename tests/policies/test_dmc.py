"""DMC checkpoints by their format, with random weights: slots are means of tokens, which are freed once they joined."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from policies.experiments.dms import DMS
from policies.snapkv import SnapKV
from runahead import Model
from runahead.model.marking.means import sums_so_far
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import AVERAGING, JOINS, build, largest_difference, prompt, throughout
from tests.policies.running import (
    GENERATED,
    MARKED_TOKENS,
    ROUNDING,
    Run,
    require_chains,
    require_engines_refuse,
    require_logits,
    require_rows_chunks_and_turns,
)
from tests.ranks.tasks import tiny_model

NUM_TOKENS, TOLERANCE = MARKED_TOKENS, ROUNDING  # float64

every_family = pytest.mark.parametrize("family", AVERAGING)


class Slots:
    """The slots of one KV head, as the paper has them: a token is appended, or averaged into the last one.

    Args:
        most: tokens of a mean, 0 is any number.
        weighs, counts: False is a wrong variant: all tokens weigh the same, or a slot the same as a token.
    """

    def __init__(self, most: int, *, weighs: bool = True, counts: bool = True) -> None:
        self.most, self.weighs, self.counts = most, weighs, counts
        self.slots: list[tuple[Tensor, Tensor, int]] = []  # key before RoPE, value, position of the newest token
        self.joined: list[list[tuple[Tensor, Tensor, Tensor]]] = []

    def take(self, k_H: Tensor, v_V: Tensor, weight: Tensor, position: int, *, joins: bool) -> None:
        weight = weight if self.weighs else torch.ones_like(weight)
        if joins and self.slots:
            self.slots.pop()
            last = self.joined.pop()
        else:
            last = []
        last = [*last, (k_H, v_V, weight)][-self.most :]
        self.joined.append(last)
        total = sum(w for *_, w in last)
        k_H, v_V = (sum(each[i] * each[2] for each in last) / total for i in (0, 1))
        if not self.counts and len(last) > 1:
            k_H, v_V = ((sum(each[i] for each in last[:-1]) / (len(last) - 1) + last[-1][i]) / 2 for i in (0, 1))
        self.slots.append((k_H, v_V, position))


@cache
def by_hand(family: str, ids: tuple[int, ...], wrong: str = "", **options: float) -> tuple[Tensor, list[list[int]]]:
    """Logits (S, V) of a text, token by token, and the number of slots of each layer and KV head after it."""
    module, settings = build(family, **options), {**JOINS, **AVERAGING[family].config, **options}
    init, config, decoder = settings["dmc_init_val"], module.config, module.model
    heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    stored = [
        [
            Slots(int(settings["dmc_window_size"]), weighs=wrong != "weighs", counts=wrong != "counts")
            for _ in range(heads)
        ]
        for _ in decoder.layers
    ]
    logits = []
    with torch.inference_mode(), throughout(torch.float64):
        rotated = partial(turned, decoder.rotary_emb)
        for position, token in enumerate(ids):
            x_D = decoder.embed_tokens(torch.tensor(token))
            for layer, slots_K in zip(decoder.layers, stored, strict=True):
                attention, h_D = layer.self_attn, layer.input_layernorm(x_D)
                q_NH, k_KH, v_KV = (
                    project(h_D).view(-1, attention.head_dim).clone()
                    for project in (attention.q_proj, attention.k_proj, attention.v_proj)
                )
                if hasattr(attention, "q_norm"):
                    q_NH, k_KH = attention.q_norm(q_NH), attention.k_norm(k_KH)
                importance_K, logit_K = q_NH[:, -1].view(heads, group).mean(dim=1), k_KH[:, -1] - init
                q_NH, k_KH = q_NH.clone(), k_KH.clone()
                q_NH[:, -1] = k_KH[:, -1] = 0
                out = []
                for head, slots in enumerate(slots_K):
                    weight = torch.sigmoid(importance_K[head] + init)
                    if wrong == "rotated first":
                        k_H, at = rotated(k_KH[head], position), None
                    else:
                        k_H, at = k_KH[head], position
                    slots.take(k_H, v_KV[head], weight, position, joins=bool(logit_K[head] > 0))
                    keys = torch.stack([k if at is None else rotated(k, newest) for k, _, newest in slots.slots])
                    values = torch.stack([v for _, v, _ in slots.slots])
                    for q_H in q_NH[head * group : (head + 1) * group]:
                        q_H = rotated(q_H, position)
                        q_H[-1] = 0
                        out.append((keys @ q_H * attention.scaling).softmax(dim=0) @ values)
                x_D = x_D + attention.o_proj(torch.cat(out))
                x_D = x_D + layer.mlp(layer.post_attention_layernorm(x_D))
            logits.append(module.lm_head(decoder.norm(x_D)))
    return torch.stack(logits), [[len(slots.slots) for slots in slots_K] for slots_K in stored]


def turned(rotary: torch.nn.Module, x_H: Tensor, position: int) -> Tensor:
    cos, sin = rotary(x_H, torch.tensor([[position]]))
    return apply_rotary_pos_emb(x_H[None, None, None], x_H[None, None, None], cos, sin)[0][0, 0, 0].clone()


def test_sums_are_of_the_tokens_that_joined() -> None:
    torch.manual_seed(0)
    for num, most in ((1, 0), (1, 5), (7, 0), (33, 0), (33, 12), (20, 5), (20, 8), (9, 2)):
        x, joins = torch.randn(2, 3, num, 4, dtype=torch.float64), torch.rand(2, 3, num) < 0.8
        sums, firsts = sums_so_far(x, joins, most)
        for row in range(2):
            for head in range(3):
                first = 0
                for at in range(num):
                    first = first if joins[row, head, at] else at
                    assert firsts[row, head, at] == first
                    expected = x[row, head, max(first, at + 1 - most if most else 0) : at + 1].sum(dim=0)
                    assert torch.allclose(sums[row, head, at], expected, atol=1e-12)


@every_family
def test_logits_are_those_of_slots_that_tokens_join(family: str) -> None:
    """With or without freeing what has been averaged into another; then each head has a slot per group of tokens."""
    for kept, slots in require_logits(family, by_hand):
        # The last token joins one before it with the next token that comes.
        held = [[sum(at >= 0 for at in head) for head in layer.positions_BKn()[0].tolist()] for layer in kept.layers]
        assert held == slots
    assert any(isinstance(layer, RaggedLayer) for layer in kept.layers)
    num_tokens = NUM_TOKENS + len(GENERATED)
    assert 0.2 < sum(map(sum, slots)) / (num_tokens * sum(map(len, slots))) < 0.8


@pytest.mark.parametrize("wrong", ["weighs", "counts", "rotated first"])
def test_wrong_variants_are_seen(wrong: str) -> None:
    ids = tuple(prompt(NUM_TOKENS))
    run = Run(tiny_model("llama_dmc"), [], [list(ids)])
    expected, _ = by_hand("llama_dmc", ids, wrong)
    assert largest_difference(run.prefill()[0], expected[-1]) > 1e-3


def test_joining_all_is_one_slot_and_joining_none_keeps_all() -> None:
    ids = tuple(prompt(NUM_TOKENS))
    for init, num in ((-1e3, 1), (1e3, NUM_TOKENS)):
        with throughout(torch.float64):
            model = Model(build("llama_dmc_any", dmc_init_val=init))
        run = Run(model, [DMS()], [list(ids)])
        logits, _ = by_hand("llama_dmc_any", ids, dmc_init_val=init)
        if num > 1:  # sigmoid(-1000) is 0
            assert largest_difference(run.prefill()[0], logits[-1]) < TOLERANCE
        else:
            run.prefill()
        assert all(layer.tokens_per_head == num for layer in run.kept.layers)


@every_family
def test_padded_rows_chunks_and_later_turns(family: str) -> None:
    require_rows_chunks_and_turns(family, by_hand)


@every_family
@pytest.mark.parametrize("chosen", [RankPolicies(), RankPolicies.everywhere([DMS()])], ids=["full", "dms"])
@pytest.mark.sampled(2)
def test_chains_of_ranks(rank_pools: RankPools, family: str, chosen: RankPolicies) -> None:
    """The first tokens of a rank's chunk may join the last ones of the rank before."""
    require_chains(rank_pools, family, chosen, by_hand)


def test_what_cannot_be_is_refused() -> None:
    model = tiny_model("llama_dmc")
    with throughout(torch.float64), pytest.raises(ValueError, match="use policy=dms or policy=full"):
        RankPolicies(last=[SnapKV()]).check(model)
    require_engines_refuse(model)
    for size in (1, -1, 2.5):
        with pytest.raises(ValueError, match="must be 0 or at least 2") as raised:
            Model(build("llama_dmc", dmc_window_size=size))
        assert "\n" not in str(raised.value) and "llama" in str(raised.value)
