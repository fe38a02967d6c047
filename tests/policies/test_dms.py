"""DMS checkpoints by their format, with random weights: what tokens mark is left out of attention, and evicted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from policies.experiments.dms import DMS
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Model, Ranks, RanksOptions
from runahead.config import CacheOptions, Device, Speculate
from runahead.model.shares import check_shares
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import MARKING, MARKS, build, largest_difference, prompt, rounded, throughout
from tests.policies.running import (
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

every_family = pytest.mark.parametrize("family", MARKING)


@cache
def by_hand(family: str, ids: tuple[int, ...], **marks: float) -> tuple[Tensor, list[Tensor]]:
    """Logits (S, V) of a text, and which keys (K, S) the next query would see in each layer, from whole matrices."""
    module, window = build(family, **marks), {**MARKS, **marks}["dms_window_size"]
    scale, offset = ({**MARKS, **marks}[name] for name in ("dms_alpha_scale", "dms_initial_alpha_offset"))
    config, decoder, num = module.config, module.model, len(ids)
    seen = []
    with torch.inference_mode(), throughout(torch.float64):
        x = decoder.embed_tokens(torch.tensor([ids]))
        cos, sin = decoder.rotary_emb(x, torch.arange(num)[None])
        for layer in decoder.layers:
            attention, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(h).view(1, num, -1, attention.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                q, k = attention.q_norm(q), attention.k_norm(k)
            group = config.num_attention_heads // config.num_key_value_heads
            marks_KS = q[0, :, ::group, -1].T * scale - offset > 0  # each token's, of the one before it
            q, k, v = (each.transpose(1, 2).clone() for each in (q, k, v))
            q[:, ::group, :, -1] = 0
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            q[:, ::group, :, -1] = 0
            is_marked_KS = torch.cat([marks_KS[:, 1:], torch.zeros(len(marks_KS), 1, dtype=torch.bool)], dim=1)
            distance = torch.arange(num)[:, None] - torch.arange(num)
            sees_KCS = (distance >= 0) & ~(is_marked_KS[:, None] & (distance >= window))
            k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
            sees = sees_KCS.repeat_interleave(group, dim=0)
            weights = (q @ k.mT * attention.scaling).masked_fill(~sees, -torch.inf).softmax(dim=-1)
            x = x + attention.o_proj((weights @ v).transpose(1, 2).reshape(1, num, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            seen.append(~(is_marked_KS & (num - torch.arange(num) >= window)))
        return module.lm_head(decoder.norm(x))[0], seen


@every_family
def test_logits_are_those_of_whole_matrices_with_or_without_evicting(family: str) -> None:
    """And what is evicted is what the next query does not see; its memory is freed."""
    for kept, seen in require_logits(family, by_hand):
        for layer, seen_KS in zip(kept.layers, seen, strict=True):
            positions_Kn = layer.positions_BKn()[0].expand(len(seen_KS), -1)
            held = [[at for at in head if at >= 0] for head in positions_Kn.tolist()]
            assert held == [seen_S.nonzero().flatten().tolist() for seen_S in seen_KS]
    assert 0.3 < sum(int(each.sum()) for each in seen) / sum(each.numel() for each in seen) < 0.8
    assert any(isinstance(layer, RaggedLayer) for layer in kept.layers)
    kept.free(room=0)
    tokens = sum(int(each.sum()) for each in seen)
    assert sum(layer.slab_TBKX.nbytes for layer in kept.layers) == tokens * (8 + 1 + 8) * 8


@every_family
def test_marking_nothing_keeps_all_and_marking_all_is_a_window(family: str) -> None:
    ids, window = tuple(prompt(NUM_TOKENS)), MARKS["dms_window_size"]
    for offset, expected in ((1e9, range(NUM_TOKENS)), (-1e9, range(NUM_TOKENS - window + 1, NUM_TOKENS))):
        with throughout(torch.float64):
            model = Model(rounded(family, dms_initial_alpha_offset=offset))
        run = Run(model, [DMS()], [list(ids)])
        logits, _ = by_hand(family, ids, dms_initial_alpha_offset=offset)
        assert largest_difference(run.prefill()[0], logits[-1]) < TOLERANCE
        for layer in run.kept.layers:
            positions = layer.positions_BKn()[0]
            assert all(head == list(expected) for head in positions.tolist())


@every_family
def test_padded_rows_chunks_and_later_turns(family: str) -> None:
    """Tokens that are not evicted yet make no difference."""
    require_rows_chunks_and_turns(family, by_hand)


@every_family
@pytest.mark.parametrize("chosen", [RankPolicies(), RankPolicies.everywhere([DMS()])], ids=["full", "dms"])
@pytest.mark.sampled(2)
def test_chains_of_ranks(rank_pools: RankPools, family: str, chosen: RankPolicies) -> None:
    """The last token of a rank's chunk may be marked by the first one of the next."""
    require_chains(rank_pools, family, chosen, by_hand)


def refusals() -> Iterator[tuple[str, RankPolicies]]:
    yield "which policy snapkv does not support; use policy=dms or policy=full", RankPolicies(last=[SnapKV()])
    yield "which cache.bits=4 does not support; use cache.bits=null", RankPolicies(storage=CacheOptions(bits=4))


def test_what_cannot_be_is_refused() -> None:
    model = tiny_model("qwen3_dms")
    for says, policies in refusals():
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            policies.check(model)
        assert "\n" not in str(raised.value)
    with throughout(torch.float64), pytest.raises(ValueError, match=r"this one \(llama\) marks none; use another"):
        RankPolicies(last=[DMS()]).check(tiny_model("llama"))
    require_engines_refuse(model)
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    with pytest.raises(ValueError, match="which generation.speculate=lookup does not support"):
        Engine(model, ranks).generate([prompt(9)], GenerationOptions(speculate=Speculate.lookup))
    with pytest.raises(ValueError, match="leave ranks.tensor out"):
        check_shares(model.config, 2)
    for config, says in (
        ({"dms_separate_alpha": True}, "by an adapter of its own"),
        ({"dms_alpha_per": "layer"}, "per layer"),
        ({"dms_window_size": 1}, "must be at least 2"),
    ):
        with pytest.raises(ValueError, match=says) as raised:
            Model(build("qwen3_dms", **config))
        assert "\n" not in str(raised.value) and "qwen3" in str(raised.value)
