"""ALiBi under cache policies: transformers' own dense attention with a mask that leaves each head what it kept.

A kept token keeps its position, so its bias: the mask takes away what was dropped, and moves nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from policies.adakv import AdaKV
from policies.base import Policy
from policies.criticalkv import CriticalKV
from policies.fastgen import FastGen
from policies.h2o import H2O
from policies.kvzip import KVzip
from policies.layer_view import Phase
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.slabs import KVShape
from runahead.rotary import Rotary
from runahead.thinning.cutting import cut_back
from tests.families import build, prompt, throughout
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model

# Legend: B batch, N query heads, K kv heads, S tokens, n slots, H head dim.

TOLERANCE = 1e-9  # float64
ATTENTION = {
    "bloom": "self_attention",
    "bloom_6_heads": "self_attention",
    "mpt": "attn",
    "falcon_alibi": "self_attention",
}
SNAPKV = SnapKV(budget=16, window=4, kernel=3)
POLICIES: list[Policy] = [
    StreamingLLM(budget=16, sinks=3, evict_every=4),
    SNAPKV,
    H2O(budget=16, evict_every=2),
    TOVA(budget=16, evict_every=1),
    AdaKV(scorer=SNAPKV, alpha=0.0),
    FastGen(window=4, sinks=2, frequent=8, local=10, recovered=0.15),
    CriticalKV(scorer=SNAPKV, first_share=0.5),
    KVzip(budget=16, sinks=2, chunk_tokens=15),
]
LENGTHS = (40, 23, 9)
GENERATED = [5, 7, 11, 13, 17, 19]


def masked_logits(family: str, ids: list[int], sees: list[Tensor]) -> Tensor:
    """Logits (S, V) of transformers' model, of whose layers each head sees the tokens of (N, S, S) alone."""
    module = build(family, attention="eager" if family != "falcon_alibi" else "sdpa")
    attention = [each for name, each in module.named_modules() if name.endswith("." + ATTENTION[family])]

    def masks(sees_NSS: Tensor, _: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = keywords["attention_mask"]
        if mask.dtype == torch.bool:  # MPT: what is not seen
            return args, {**keywords, "attention_mask": mask | ~sees_NSS}
        return args, {**keywords, "attention_mask": mask.masked_fill(~sees_NSS, torch.finfo(mask.dtype).min)}

    for layer, sees_NSS in zip(attention, sees, strict=True):
        layer.register_forward_pre_hook(partial(masks, sees_NSS), with_kwargs=True)
    with torch.inference_mode(), throughout(module.dtype):
        logits: Tensor = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", ATTENTION)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_it_is_transformers_with_a_mask(policy: Policy, family: str) -> None:
    """Seen to fail: slots in place of positions; in scores no bias; the bias of the first head for all."""
    model, given = tiny_model(family), [prompt(length, row) for row, length in enumerate(LENGTHS)]
    run = Run(model, [policy], given)
    ours, kept = [run.prefill()], []
    for token in GENERATED:
        kept.append([layer.positions_BKn().expand(-1, layer.shape.num_kv_heads, -1) for layer in run.kept.layers])
        ours.append(run.decode(token))
    ours_BSV = torch.stack(ours, dim=1)
    assert any(layer_BKn.shape[2] < max(LENGTHS) for layer_BKn in kept[0])
    for row, ids in enumerate(given):
        total, sees = len(ids) + len(GENERATED), []
        for layer in range(model.num_layers):
            sees_NSS = torch.ones(model.kv_shapes[layer].num_kv_heads, total, total, dtype=torch.bool).tril()
            for step, layers in enumerate(kept):
                query = len(ids) + step
                sees_NSS[:, query] = False
                for head, positions in enumerate(layers[layer][row].tolist()):
                    sees_NSS[head, query, [query, *(position for position in positions if position >= 0)]] = True
            sees.append(sees_NSS)
        theirs_SV = masked_logits(family, [*ids, *GENERATED], sees)[len(ids) - 1 :]
        torch.testing.assert_close(ours_BSV[row], theirs_SV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["bloom", "bloom_6_heads", "mpt"])
def test_reencoded_it_is_transformers_on_what_is_left_by_hand(family: str) -> None:
    """A token's bias is that of its place in the cache (StreamingLLM of MPT): TOVA by transformers' own attention, on a
    cache of what it leaves. Seen to fail: scores with the bias of positions in the text."""
    ids, model, module = prompt(40), tiny_model(family), build(family, attention="eager")
    run, cache = Run(model, [TOVA(budget=16, evict_every=1)], [ids], reencoded=True), DynamicCache()
    text_n = [torch.arange(40)] * model.num_layers
    for fed in (ids, *([token] for token in GENERATED)):
        ours_V = (run.prefill() if len(fed) > 1 else run.decode(fed[0]))[0]
        with torch.inference_mode(), throughout(module.dtype):
            theirs = module(torch.tensor([fed]), past_key_values=cache, output_attentions=True)
        torch.testing.assert_close(ours_V, theirs.logits[0, -1], atol=TOLERANCE, rtol=0)
        for number, (layer, attention) in enumerate(zip(cache.layers, theirs.attentions, strict=True)):
            best_m = attention[0, :, -1].mean(dim=0).topk(16).indices.sort().values
            layer.keys, layer.values = layer.keys[:, :, best_m], layer.values[:, :, best_m]
            text_n[number] = text_n[number][best_m]
            assert run.kept.layers[number].positions_BKn()[0, 0].tolist() == text_n[number].tolist()
            text_n[number] = torch.cat([text_n[number], torch.tensor([run.seen])])


SHAPE = KVShape(num_kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float64)
SLOPES_N1 = 0.01 * torch.arange(1, 5, dtype=torch.float64)[:, None]
BIAS = AttentionTerms(scaling=0.3, key_bias=lambda keys_S: SLOPES_N1 * keys_S)
PADS = [0, 13]
NUM_SLOTS = 150


def kept_layer() -> KeptLayer:
    """Two rows, of which one is padded; positions with gaps that differ between rows and heads."""
    generator = torch.Generator().manual_seed(0)
    layer = KeptLayer.empty(SHAPE, batch=2, room=NUM_SLOTS, device=torch.device("cpu"))
    gaps_TBK = torch.randint(1, 4, (NUM_SLOTS, 2, 2), generator=generator)
    layer.placed_TBK = (gaps_TBK.cumsum(dim=0) - gaps_TBK[:1]).int()
    for row, pad in enumerate(PADS):
        layer.placed_TBK[:pad, row] = -1
    layer.slab_TBKX.copy_(torch.randn(layer.slab_TBKX.shape, generator=generator, dtype=torch.float64))
    layer.num_slots, layer.pads, layer.alike = NUM_SLOTS, PADS, False
    return layer


def unequal() -> KeptLayer:
    """Every other slot of the first head, all of the second."""
    slots_n = torch.arange(NUM_SLOTS)
    half_m = torch.where(slots_n % 2 == 0, slots_n, -1).sort().values
    is_token_B1n = slots_n >= torch.tensor(PADS)[:, None, None]
    slots_BKm = torch.stack([half_m, slots_n]).expand(2, -1, -1)
    slots_BKm = torch.where(is_token_B1n.expand(-1, 2, -1).gather(2, slots_BKm.clamp_min(0)), slots_BKm, -1)
    return cut_back(kept_layer(), slots_BKm.sort(dim=-1).values, room=3)


def in_few_bits(layer: KeptLayer) -> KeptLayer:
    return layer.in_bits(FewBits(bits=4, residual=40, residual_bits=None, keys_by_token=False), room=3)


FORMS = {
    "equal heads": kept_layer,
    "unequal heads": unequal,
    "equal heads in few bits": lambda: in_few_bits(kept_layer()),
    "unequal heads in few bits": lambda: in_few_bits(unequal()),
}


@pytest.mark.parametrize(
    ("form", "reencoded"), [*((form, False) for form in FORMS), ("equal heads", True), ("unequal heads", True)]
)
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_layer_is_attended_to_with_the_bias_of_its_tokens(form: str, reencoded: bool, num_new: int) -> None:
    """Dense attention head by head to the numbers that the layer holds, those of codes among them. With re-encoded
    positions a token's is its place in its head."""
    layer = FORMS[form]()
    layer.rotary = Rotary(torch.empty(0)) if reencoded else None
    generator = torch.Generator().manual_seed(1)
    q_BNCH, k_BKCH, v_BKCV = (
        torch.randn(2, heads, num_new, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    tokens = NewTokens(500, [0, 0], Phase.decode if num_new == 1 else Phase.prefill)
    layer.append(k_BKCH, v_BKCV, tokens)
    ours_BNCV = layer.seen(q_BNCH, tokens).output(BIAS)
    (k_BKnH, v_BKnV), positions_BKn = layer.read(), layer.positions_BKn()
    for row in range(2):
        for head in range(4):
            of_head = row, head // 2
            positions_n = positions_BKn[of_head]
            biased_n = (positions_n >= 0).cumsum(dim=0) - 1 if reencoded else positions_n
            scores_Cn = BIAS.scaling * q_BNCH[row, head] @ k_BKnH[of_head].T + SLOPES_N1[head] * biased_n
            sees_Cn = (positions_n >= 0) & (positions_n <= 500 + torch.arange(num_new)[:, None])
            weights_Cn = scores_Cn.masked_fill(~sees_Cn, -torch.inf).softmax(dim=-1)
            theirs_CV = weights_Cn @ v_BKnV[of_head].nan_to_num()
            torch.testing.assert_close(ours_BNCV[row, head], theirs_CV, atol=TOLERANCE, rtol=0)
