"""The KV cache in 8, 4 or 2 bits, under every policy: what every store must do, and what only this one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from policies.base import Policy
from policies.h2o import H2O
from policies.layer_view import Phase
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, Engine, GenerationOptions, PrefillOptions
from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import NEW_ROOM, KeptLayer
from runahead.cache.kv_cache import seen_in
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import TextPart
from runahead.cache.quantised import groups
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import GROUP, ChannelGroups, TokenGroups
from runahead.cache.quantised.rows import QuantisedRows
from runahead.cache.slabs import KVShape
from runahead.config import CacheOptions, Device, PrefillName, RanksOptions
from runahead.ranks.ranks import Ranks
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.cache.predicted_bytes import quantised_bytes
from tests.families import prompt
from tests.policies.test_matrix import policy
from tests.ranks.tasks import tiny_model

RESIDUAL = 8
LENGTHS = (77, 60, 7)
FAMILIES = ["llama", "gpt2", "gpt_bigcode", "deepseek_v3", "gpt_oss", "gemma2"]
every_bits = pytest.mark.parametrize("bits", [8, 4, 2])
by_channel_or_token = pytest.mark.parametrize(
    "policies", [[], [StreamingLLM(budget=4096)]], ids=["keys by channel", "keys by token"]
)


def policies_of(
    *policies: Policy, bits: int | None = 4, residual: int = RESIDUAL, residual_bits: int | None = None
) -> RankPolicies:
    storage = CacheOptions(bits=bits, residual=residual, residual_bits=residual_bits)
    return RankPolicies.everywhere(policies, storage=storage)


class Talk:
    """A conversation of padded rows, in float64."""

    def __init__(self, family: str, policies: RankPolicies, lengths: tuple[int, ...] = (77,)) -> None:
        self.model = tiny_model(family)
        if self.model.uneven_limit is not None:
            lengths = lengths[:1]
        self.conversation, longest = Conversation(self.model, policies), max(lengths)
        pads = [longest - length for length in lengths]
        rows = [[0] * pad + prompt(length, seed) for seed, (pad, length) in enumerate(zip(pads, lengths, strict=True))]
        self.first_BV = self.conversation.feed(torch.tensor(rows), pads=pads)

    def follow(self, *tokens: int) -> Tensor:
        """Logits (B, C, V) of generated tokens."""
        return self.conversation.follow(torch.tensor([tokens]))

    def feed(self, *tokens: int) -> Tensor:
        """Logits (B, C, V) of given tokens."""
        return self.conversation.feed(torch.tensor([tokens]), all_logits=True)

    def layer(self, number: int = 0) -> KeptLayer:
        assert self.conversation.cache is not None
        layer = self.conversation.cache.layers[number]
        assert layer.codes is not None
        return layer

    def part(self) -> QuantisedRows:
        """The quantised tokens of the first rows of the first layer."""
        codes = self.layer().codes
        assert codes is not None
        return codes.parts[0]


def generate(family: str, prompts: list[list[int]], policies: RankPolicies, num_new: int = 4, **more: Any) -> Any:
    model = tiny_model(family)
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), policies=policies, **more)
    return engine.generate(prompts, GenerationOptions(max_new_tokens=num_new, ignore_eos=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(77,), LENGTHS], ids=["alone", "padded"])
@by_channel_or_token
@pytest.mark.sampled(3)
def test_attention_is_that_to_the_dequantised_tokens(
    family: str, lengths: tuple[int, ...], policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, of generated tokens and of another turn's.

    Seen to fail: keys of a block without their scales.
    """
    monkeypatch.setattr(groups, "BLOCK_TOKENS", GROUP)
    found = []
    for is_oracle in (False, True):
        if is_oracle:
            monkeypatch.setattr(
                KeptLayer,
                "seen",
                lambda layer, q, tokens: seen_in(layer.slab(), q, start=layer.end - q.shape[2], pads=layer.pads),
            )
        talk = Talk(family, policies_of(*policies), lengths)
        assert talk.part().num_tokens == 2 * GROUP
        assert isinstance(talk.part().keys, TokenGroups if policies else ChannelGroups)
        found.append([talk.follow(5, 7), talk.feed(3, 4, 5), talk.follow(9)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)  # float64


def test_no_more_than_a_block_is_dequantised_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "BLOCK_TOKENS", GROUP)
    talk, most = Talk("llama", policies_of()), []
    unpack = groups.Groups._unpacked
    monkeypatch.setattr(
        groups.Groups, "_unpacked", lambda self, a, b, *rest: most.append(b - a) or unpack(self, a, b, *rest)
    )
    talk.follow(5)
    talk.feed(6, 7)
    assert set(most) == {GROUP}


def test_the_tokens_of_a_turn_are_exact_to_each_other() -> None:
    """However many they are, and in chunks of it that drop nothing yet; they are quantised after it."""
    exact, talk = (Talk("llama", policies_of(bits=bits), (RESIDUAL,)) for bits in (None, 4))
    given = prompt(50)
    assert torch.equal(exact.feed(*given), talk.feed(*given))
    assert talk.part().num_tokens == GROUP
    for each in (exact, talk):
        each.conversation = Conversation(each.model, policies_of(bits=None if each is exact else 4))
        each.conversation.feed(torch.tensor([given]), cut_back=False)
    assert torch.equal(exact.feed(*given), talk.feed(*given))


@pytest.mark.parametrize(("bits", "residual_bits"), [(8, None), (4, 16), (2, None)])
@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "deepseek_v3"])
@by_channel_or_token
def test_bytes_are_known_to_the_byte(family: str, bits: int, residual_bits: int | None, policies: list[Policy]) -> None:
    """Seen to fail: without the scales of channels."""
    model, rows = tiny_model(family), [prompt(77), prompt(77, seed=1)]
    storing = policies_of(*policies, bits=bits, residual_bits=residual_bits)
    result: GenerationBatch = generate(family, rows, storing, num_new=2)
    known: dict[str, Any] = {"bits": bits, "residual": RESIDUAL, "residual_bits": residual_bits, "batch": 2}
    known["keys_by_token"] = bool(policies)
    assert result.ranks[0].kv_kept_bytes == quantised_bytes(model.kv_shapes, 77, room=1, **known)
    conversation = Conversation(model, storing)
    conversation.feed(torch.tensor(rows))
    assert conversation.kv_bytes == quantised_bytes(model.kv_shapes, 77, **known)
    slabs = sum(shape.bytes_per_token(2) * 77 for shape in model.kv_shapes)
    assert conversation.full_kv_bytes == slabs > conversation.kv_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_of_smollm2_are_a_third_of_those_of_16_bits(dtype: torch.dtype) -> None:
    """64 numbers take 32 bytes and two scales with zero points; the window is counted, and its room."""
    shapes = [KVShape(num_kv_heads=3, key_dim=64, value_dim=64, dtype=dtype)] * 30
    options = CacheOptions()
    window = {"residual": options.residual, "residual_bits": options.residual_bits, "room": NEW_ROOM}
    for num_tokens in range(8000, 8000 + GROUP):  # the window has 128 to 159 of them
        in_16_bits = num_tokens * 30 * 3 * (64 + 64) * 2
        assert quantised_bytes(shapes, num_tokens, bits=8, **window) / in_16_bits <= 0.6
        assert quantised_bytes(shapes, num_tokens, bits=4, **window) / in_16_bits <= 0.35
        assert quantised_bytes(shapes, num_tokens, bits=2, **window) / in_16_bits <= 0.23


def test_the_window_is_in_16_bits_and_read_in_the_models_dtype() -> None:
    """By default, of a model with more. What left the prompt quantised is not rounded before."""
    turns = [range(3, 31), [5, 6]]
    exact, talk = (Talk("llama", policies_of(residual_bits=bits)) for bits in (None, 16))
    assert CacheOptions().residual_bits == 16
    assert torch.equal(exact.first_BV, talk.first_BV)
    kv, window = (each.layer().slab().slab_TBKX for each in (exact, talk))
    end = talk.part().end
    assert end == 2 * GROUP and talk.layer().slab_TBKX.dtype == torch.float16
    assert torch.equal(window[:end], kv[:end])
    assert torch.equal(window[end:], kv[end:].half().double())
    for tokens in turns:
        found, expected = (each.feed(*tokens) for each in (talk, exact))
        assert found.dtype == torch.float64
        assert 0 < (found - expected).abs().max() < 1e-2  # a code may change with its number's rounding
    kept = Talk("llama", policies_of(H2O(budget=48), residual_bits=16))  # which reads all keys of a layer
    assert kept.follow(5, 7).isfinite().all()


def test_the_whole_cache_is_never_there_as_it_was() -> None:
    """Each layer is quantised when its prompt has attended to it, while a few slabs serve all layers."""
    quantised, full = (generate("llama_deep", [prompt(150)], policies_of(bits=bits), num_new=1) for bits in (4, None))
    assert quantised.ranks[0].kv_peak_bytes < 0.8 * full.ranks[0].kv_peak_bytes


@every_bits
def test_the_last_tokens_are_exact_and_the_others_are_not(bits: int) -> None:
    """In the first layer, whose keys and values depend on nothing that is stored."""
    exact, talk = Talk("llama", policies_of(bits=None)), Talk("llama", policies_of(bits=bits))
    for tokens in ([5], range(3, 31)):
        exact.follow(*tokens)
        talk.follow(*tokens)
        assert exact.conversation.cache is not None
        slab, ours = exact.conversation.cache.layers[0].slab().slab_TBKX, talk.layer().slab().slab_TBKX
        num_exact = talk.layer().num_slots - talk.part().end
        assert RESIDUAL <= num_exact < RESIDUAL + GROUP
        assert torch.equal(slab[-num_exact:], ours[-num_exact:])
        assert (slab[:-num_exact] != ours[:-num_exact]).any(dim=-1).all()


@pytest.mark.parametrize(("name", "bits"), [("h2o", 2), ("streaming_llm", 4), ("snapkv", 4)])
def test_kept_tokens_are_quantised_once(name: str, bits: int) -> None:
    """However often others are dropped beside them, and whichever each head keeps, over two turns."""
    given, tokens = prompt(77), list(range(3, 23))
    full = Talk("llama", policies_of(bits=None))
    talk = Talk("llama", policies_of(policy(name, 48), bits=bits, residual=12))
    for each in (full, talk):
        each.follow(*tokens)
        each.feed(*given[:30])
        each.follow(5, 6)
    assert full.conversation.cache is not None
    exact_BKnX = full.conversation.cache.layers[0].slab().slab_TBKX.permute(1, 2, 0, 3)
    k, v = exact_BKnX.split(full.model.kv_shapes[0].key_dim, dim=3)
    layer = talk.layer()
    scales = talk.part().scales
    assert scales is not None
    keys, values = scales.groups(k, bits), TokenGroups.quantise(v, bits)
    num_tokens = k.shape[2]
    rounded_BKnX = torch.cat([scales.read(keys, 0, num_tokens, k.dtype), values.read(0, num_tokens, v.dtype)], dim=3)
    positions = layer.positions_BKn()[..., None].long()
    ours, end = layer.slab().slab_TBKX.permute(1, 2, 0, 3), talk.part().end
    assert 0 < end < layer.num_slots < full.conversation.num_tokens
    assert torch.equal(ours[:, :, :end], rounded_BKnX.take_along_dim(positions, dim=2)[:, :, :end])
    assert torch.equal(ours[:, :, end:], exact_BKnX.take_along_dim(positions, dim=2)[:, :, end:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheOptions(bits=3), "cache.bits=3 must be 8, 4 or 2"),
        (lambda: CacheOptions(tier_bits=6), "cache.tier_bits=6 must be 8, 4 or 2"),
        (lambda: CacheOptions(bits=4, residual=0), "cache.residual=0 must be at least 1"),
        (lambda: CacheOptions(bits=4, residual_bits=8), "cache.residual_bits=8 must be 16, or null"),
        (
            lambda: generate("llama", [[1]], policies_of(), prefill=PrefillOptions(name=PrefillName.tsp)),
            "cache.bits=4 needs prefill=kv_runahead or prefill=single",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_keys_are_grouped_by_token_only_where_single_tokens_are_dropped_later() -> None:
    by_token = {}
    for name in ("h2o", "snapkv", "kvzip"):  # the last one decides once
        policies = policies_of(policy(name))
        by_token[name] = [policies.drops_single_tokens(has_turns=has_turns) for has_turns in (False, True)]
    assert by_token == {"h2o": [True, True], "snapkv": [False, True], "kvzip": [False, False]}
    assert policies_of(SnapKV(budget=40)).while_decoding == []  # which reads no keys then


@pytest.mark.parametrize("rule", ["causal", "window", "bias"])
def test_a_part_of_a_text_in_few_bits_is_seen_by_the_positions_of_its_tokens(rule: str) -> None:
    """Also by tokens that others store, and where a group has generated tokens that do not follow each other."""
    generator = torch.Generator().manual_seed(4)
    first, prompt_end, num_text = 50, 90, 190
    terms = AttentionTerms(
        scaling=0.3,
        rule=MaskRule(sliding_window_causal_mask_function(30)) if rule == "window" else None,
        key_bias=(lambda at_S: at_S[None].double() * torch.tensor([[0.01], [0.02]])) if rule == "bias" else None,
    )
    shape = KVShape(num_kv_heads=1, key_dim=8, value_dim=8, dtype=torch.float64)
    exact = KeptLayer.empty(shape, batch=1, room=0, device=torch.device("cpu"))
    k, v = (torch.randn(1, 1, num_text, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    exact.append(k[:, :, first:prompt_end], v[:, :, first:prompt_end], NewTokens(first, [0]))
    few = FewBits(bits=4, residual=4, residual_bits=None, keys_by_token=False)
    layer = exact.in_bits(few, room=4)
    part = TextPart(range(first, prompt_end), pads=[0], owns=lambda start: start % 3 == 0)
    for start in range(prompt_end, num_text):
        tokens = NewTokens(start, [0], Phase.decode)
        tokens.part = part
        layer.append(k[:, :, start : start + 1], v[:, :, start : start + 1], tokens)
        at_S = torch.tensor(part.indices)
        if start % 17 > 1:
            continue
        q = torch.randn(1, 2, 1, 8, generator=generator, dtype=torch.float64)
        k_stored, v_stored = layer.kv_BKnX()[0, 0].split(8, dim=1)
        scores_NS = q[0, :, 0] @ k_stored.T * terms.scaling
        if terms.key_bias is not None:
            scores_NS = scores_NS + terms.key_bias(at_S)
        if rule == "window":
            scores_NS = scores_NS.masked_fill(at_S <= start - 30, -torch.inf)
        out, lse = layer.seen(q, tokens).attend(terms)
        torch.testing.assert_close(lse[0, :, 0], scores_NS.logsumexp(dim=1), atol=1e-9, rtol=0)
        expected = scores_NS.softmax(dim=1).nan_to_num(0.0) @ v_stored
        torch.testing.assert_close(out[0, :, 0].double(), expected, atol=1e-9, rtol=0)
    assert layer.codes is not None and layer.codes.parts[0].num_tokens == 2 * GROUP
