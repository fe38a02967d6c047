"""Re-encoded positions: a kept token stands where its slot is, in every layer, for every family that rotates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from policies.adakv import AdaKV
from policies.base import Policy
from policies.fastgen import FastGen
from policies.h2o import H2O
from policies.kvzip import KVzip
from policies.layer_view import LayerView
from policies.pyramidinfer import PyramidInfer
from policies.pyramidkv import PyramidKV
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from runahead import Conversation, Model, Positions, RankPolicies
from runahead.cache.quantised.groups import GROUP, ChannelGroups
from runahead.config import CacheOptions
from runahead.rotary import Rotary
from runahead.thinning.ragged import RaggedLayer
from tests.families import Family, build, largest_difference, prompt, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.running import Duo, Run
from tests.policies.written_out import WrittenOut
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9  # float64
GENERATED = [5, 7, 11, 13]
Keep = Callable[[LayerView], Tensor | None]

ROTATING = [
    "llama",
    "qwen2",
    "qwen3",
    "phi",  # half of the head's dims
    "phi3",
    "gemma",
    "olmo2",
    "granite",
    "stablelm",  # a quarter
    "nemotron",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",  # the last dims of each head
    "jetmoe",
    "falcon",
    "falcon_multi_query",
]
OTHERS = {
    "cohere": Family(model_type="cohere", config={"logit_scale": 1.0}),  # neighbours are pairs
    "glm": Family(model_type="glm", config={"head_dim": 8, "partial_rotary_factor": 0.5}),  # of half of the dims
    "smollm3": Family(model_type="smollm3", config={"no_rope_layers": [1, 0, 1]}),  # a layer without positions
    "llama_yarn": Family(  # tables with a factor
        model_type="llama",
        config={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama_3": Family(
        model_type="llama",
        config={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}
REFUSED = {
    "gemma2": "windows",
    "mistral": "windows",
    "llama_dynamic_ntk": "depend on the length",
    "phi3_longrope": "depend on the length",
    "opt": "counts positions by itself|adds positions",
    "gpt2": "adds positions",
    "gpt_bigcode": "adds positions",
    "bart": "counts positions by itself|adds positions",
}


def model_of(family: str) -> Model:
    if family not in OTHERS:
        return tiny_model(family)
    module = build(OTHERS[family])
    with throughout(torch.float64):
        return Model(module, name=family)


@pytest.mark.parametrize("family", [*ROTATING, *OTHERS])
@pytest.mark.sampled(2)
def test_where_nothing_is_dropped_it_is_the_full_cache(family: str) -> None:
    """Slots are positions then: so this is each family's rotation, against its own."""
    model, prompts = model_of(family), [prompt(40), prompt(23, seed=1)]
    with throughout(torch.float64):
        ours, theirs = (Run(model, [], prompts, reencoded=reencoded) for reencoded in (True, False))
    for chunk in (17, 1, 22):
        torch.testing.assert_close(ours.chunk(chunk), theirs.chunk(chunk), atol=TOLERANCE, rtol=0)
    for token in GENERATED:
        torch.testing.assert_close(ours.decode(token), theirs.decode(token), atol=TOLERANCE, rtol=0)
    assert not torch.equal(ours.kept.layers[0].slab().read(0, 9)[0], theirs.kept.layers[0].slab().read(0, 9)[0])


@pytest.mark.parametrize("family", REFUSED)
def test_other_positions_are_refused(family: str) -> None:
    policies = RankPolicies(last=[SnapKV()], positions=Positions.reencoded)
    with pytest.raises(ValueError, match=REFUSED[family]) as raised, throughout(torch.float64):
        policies.check(tiny_model(family))
    assert str(raised.value).endswith(("use policy.positions=original", "use policy=full"))
    assert "\n" not in str(raised.value)


def test_what_turns_how_is_found() -> None:
    found = {}
    for family in ("llama", "phi", "deepseek_v3", "glm", "smollm3"):
        with throughout(torch.float64):
            found[family] = [(r.interleaved, r.first, len(r.inv_freq_F)) for r in model_of(family).rotaries]
    assert found["llama"] == [(False, 0, 4)] * 3
    assert found["phi"] == [(False, 0, 2)] * 3
    assert found["deepseek_v3"] == [(False, 8, 4)] * 3
    assert found["glm"] == [(True, 0, 2)] * 3
    assert [frequencies for _, _, frequencies in found["smollm3"]] == [4, 0, 4]


def test_half_precision_loses_nothing_by_rotating_late() -> None:
    """At any position, a rotated key in bfloat16 is its exact rotation, rounded once."""
    rotary = Rotary(10000.0 ** -(torch.arange(4) / 4))
    x_TBNX = torch.randn(6, 1, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = rotary.rotated(x_TBNX, 5000, [0])
    exact = Rotary(rotary.inv_freq_F.double()).rotated(x_TBNX.double(), 5000, [0])
    torch.testing.assert_close(ours.double(), exact, atol=1e-3, rtol=2**-8)  # tables in float32; bfloat16 has 8 bits


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "policy",
    [StreamingLLM(budget=16, sinks=2), H2O(budget=16), SnapKV(budget=16, window=4, kernel=3)],
    ids=lambda policy: type(policy).__name__,
)
def test_it_is_transformers_on_keys_gathered_by_hand(policy: Policy, kv_heads: int) -> None:
    """Each row of a padded batch: the model's own keys before RoPE, those that are kept, rotated to 0, 1, 2, ..."""
    module = build("llama", num_key_value_heads=kv_heads)
    with throughout(torch.float64):
        model = Model(build("llama", num_key_value_heads=kv_heads))
        rows = [prompt(40), prompt(31, seed=1), prompt(9, seed=2)]
        run = Run(model, [policy], rows, reencoded=True)
        run.prefill()
        kept = [(layer.positions_BKn().expand(-1, kv_heads, -1).clone(), layer.pads) for layer in run.kept.layers]
        ours = torch.stack([run.decode(token) for token in GENERATED], dim=1)
        for row, ids in enumerate(rows):
            k_and_v = _projected(module, ids, kv_heads)
            cache = DynamicCache()
            for layer, (positions_BKn, pads) in enumerate(kept):
                wanted_KnH = positions_BKn[row, :, pads[row] :].long()[..., None]
                k_KnH, v_KnH = (x.take_along_dim(wanted_KnH, dim=1) for x in k_and_v[layer])
                places_1n = torch.arange(k_KnH.shape[1])[None]
                cos, sin = module.model.rotary_emb(k_KnH, places_1n)
                rotated, _ = apply_rotary_pos_emb(k_KnH[None], k_KnH[None], cos, sin)
                cache.update(rotated, v_KnH[None], layer)
            n = cache.get_seq_length()
            assert n == min(16, len(ids))
            for step, token in enumerate(GENERATED):
                position = torch.tensor([[n + step]])
                theirs = module(torch.tensor([[token]]), position_ids=position, past_key_values=cache).logits[0, -1]
                torch.testing.assert_close(ours[row, step], theirs, atol=TOLERANCE, rtol=0)


def _projected(module, ids: list[int], kv_heads: int) -> list[tuple[Tensor, Tensor]]:  # type: ignore[no-untyped-def]
    """Keys (K, S, H) before RoPE and values of every layer, as the model's projections give them."""
    seen: list[Tensor] = []
    projections = [
        projection for layer in module.model.layers for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    hooks = [each.register_forward_hook(lambda _, __, out: seen.append(out[0])) for each in projections]
    try:
        module(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    split = [x.unflatten(1, (kv_heads, -1)).transpose(0, 1) for x in seen]
    return list(zip(split[::2], split[1::2], strict=True))


@pytest.mark.parametrize(
    "policy",
    [PyramidKV(budget=16, window=4, kernel=3, beta=2.0), H2O(budget=16), StreamingLLM(budget=16)],
    ids=lambda policy: type(policy).__name__,
)
def test_layers_number_their_own_slots(policy: Policy) -> None:
    """They keep different numbers of tokens, so a token has another position in each."""
    model, ids = tiny_model("llama"), prompt(40)
    reference = WrittenOut(build("llama"))
    run = Run(model, [policy], [ids], reencoded=True)
    torch.testing.assert_close(run.prefill()[0], reference.feed(ids), atol=TOLERANCE, rtol=0)
    for layer, kept in enumerate(run.kept.layers):
        reference.keep(layer, kept.positions_BKn()[0].long())
    for token in GENERATED:
        torch.testing.assert_close(run.decode(token)[0], reference.feed([token]), atol=TOLERANCE, rtol=0)
    if isinstance(policy, PyramidKV):
        assert len(set(run.kept.slots_by_layer)) == 3


UNEQUAL: dict[str, list[Policy]] = {
    "adakv": [AdaKV(scorer=SnapKV(budget=16, window=4, kernel=3), alpha=0.0)],
    "fastgen": [FastGen(window=4, sinks=2, frequent=8, local=10, recovered=0.15)],
    "duo_attention": [Duo(sinks=3, recent=8)],
    "kvzap": [MadeUpKVzap(recent=3, threshold=0.0, evict_every=2)],
    "kvzip": [KVzip(budget=16, sinks=2, chunk_tokens=15)],
    "zigzagkv": [ZigZagKV(budget=16, window=4, kernel=3)],
    "before another": [AdaKV(scorer=SnapKV(budget=20, window=4, kernel=3), alpha=0.0), TOVA(budget=12, evict_every=2)],
    "after another": [H2O(budget=20), AdaKV(scorer=SnapKV(budget=12, window=4, kernel=3), alpha=0.0)],
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_heads_number_their_own_tokens(name: str) -> None:
    """Dense attention head by head, where heads keep different numbers of tokens: in each they are at 0, 1, 2, ...

    Seen to fail: the row's places for all of its heads; a prompt repeated over keys that are not rotated.
    """
    model, given = tiny_model("llama"), [prompt(40), prompt(31, seed=1), prompt(9, seed=2)]
    references = [WrittenOut(build("llama")) for _ in given]
    run, unequal = Run(model, UNEQUAL[name], given, reencoded=True), 0

    def same(logits_BV: Tensor, fed: list[list[int]]) -> None:
        nonlocal unequal
        for logits_V, reference, ids in zip(logits_BV, references, fed, strict=True):
            torch.testing.assert_close(logits_V, reference.feed(ids), atol=TOLERANCE, rtol=0)
        for layer, kept in enumerate(run.kept.layers):
            unequal += isinstance(kept, RaggedLayer)
            for reference, positions_Kn in zip(references, kept.positions_BKn().long(), strict=True):
                reference.keep(layer, positions_Kn)

    same(run.prefill(), given)
    if "another" not in name:  # until then a token's place is its position
        original = Run(model, UNEQUAL[name], given)
        original.prefill()
        for kept, expected in zip(run.kept.layers, original.kept.layers, strict=True):
            assert torch.equal(kept.positions_BKn(), expected.positions_BKn())
    for token in GENERATED:
        same(run.decode(token), [[token]] * 3)
    same(run.next_prompt([17, 19, 23]), [[17, 19, 23]] * 3)
    assert unequal


@pytest.mark.parametrize(
    "policies",
    [[], [SnapKV(budget=60, window=4, kernel=3)], [StreamingLLM(budget=60)], [H2O(budget=60)]],
    ids=["all tokens", "snapkv", "streaming_llm", "h2o"],
)
def test_in_few_bits_keys_are_stored_as_they_are_before_they_are_rotated(policies: list[Policy]) -> None:
    """Each token is attended to at its slot, by the numbers that are stored; groups leave while tokens come."""
    storage = CacheOptions(bits=4, residual=8, residual_bits=None)
    places = RankPolicies.everywhere(policies, Positions.reencoded, storage)
    ids, reference, talk = prompt(100), WrittenOut(build("llama")), Conversation(tiny_model("llama"), places)
    with throughout(torch.float64):
        torch.testing.assert_close(talk.feed(torch.tensor([ids]))[0], reference.feed(ids), atol=TOLERANCE, rtol=0)
        assert talk.cache is not None
        for number, kept in enumerate(talk.cache.layers):
            assert kept.codes is not None
            [part] = kept.codes.parts
            assert part.num_tokens >= GROUP
            reference.keep(number, kept.positions_BKn()[0].long())
            if isinstance(part.keys, ChannelGroups):
                exact_1KnH = reference.k_KnH[number][None, :, : part.num_tokens]
                keys = ChannelGroups.quantise(exact_1KnH, 4).read(0, part.num_tokens, torch.float64)
                assert largest_difference(kept.kv_BKnX()[0, :, : part.num_tokens, : keys.shape[3]], keys[0]) < TOLERANCE
        for token in [*GENERATED, *range(20, 52)]:
            for number, kept in enumerate(talk.cache.layers):
                kept.flush(coming=1)  # as storing the token does
                k_BKnH, v_BKnV = kept.read()
                reference.k_KnH[number], reference.v_KnH[number] = k_BKnH[0], v_BKnV[0]
                reference.tokens_Kn[number] = kept.positions_BKn()[0].long().expand(len(k_BKnH[0]), -1)
            ours_V = talk.follow(torch.tensor([[token]]))[0, 0]
            torch.testing.assert_close(ours_V, reference.feed([token]), atol=TOLERANCE, rtol=0)


def test_narrowed_layers_see_no_gaps() -> None:
    """PyramidInfer's chunk stands side by side in deeper layers, as what is left of it would alone."""
    model = tiny_model("llama", torch.float64)
    policy, ids = PyramidInfer(mean_keep=0.6, min_tokens=8), prompt(40)
    ours, gaps = Run(model, [policy], [ids], reencoded=True), Run(model, [policy], [ids])
    logits_V = ours.prefill()[0]
    assert (logits_V - gaps.prefill()[0]).abs().max() > 1e-3
    assert ours.kept.slots_by_layer == gaps.kept.slots_by_layer == policy.lengths(40, 3)
    left = [layer.positions_BKn()[0, 0].long() for layer in ours.kept.layers]
    reference = WrittenOut(build("llama"))
    torch.testing.assert_close(logits_V, reference.feed(ids, left), atol=TOLERANCE, rtol=0)
    for token in GENERATED:
        torch.testing.assert_close(ours.decode(token)[0], reference.feed([token]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("reencoded", [True, False])
def test_policies_see_keys_as_the_queries_did(reencoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two steps, too: what the first one kept, where it stood when it was attended to."""
    first, second = SnapKV(budget=20, window=4, kernel=3), StreamingLLM(budget=9, sinks=2)
    views: dict[str, list[tuple[Tensor, Tensor | None]]] = {"first": [], "second": []}
    for name, policy in (("first", first), ("second", second)):

        def noting(view: LayerView, name: str = name, keep: Keep = policy.keep) -> Tensor | None:
            slots_BKm = keep(view)
            views[name].append((view.k_BKnH.clone(), slots_BKm))
            return slots_BKm

        monkeypatch.setattr(policy, "keep", noting)
    model, reference = tiny_model("llama"), WrittenOut(build("llama"))
    run = Run(model, [first, second], [prompt(40)], reencoded=reencoded)
    run.prefill()
    reference.feed(prompt(40))
    for layer in range(3):
        (k_BKnH, slots_BKm), (left_BKmH, _) = views["first"][layer], views["second"][layer]
        assert slots_BKm is not None
        expected_KnH = reference.rotated(reference.k_KnH[layer], torch.arange(40))
        torch.testing.assert_close(k_BKnH[0], expected_KnH, atol=TOLERANCE, rtol=0)
        for head in range(2):
            assert torch.equal(left_BKmH[0, head], k_BKnH[0, head, slots_BKm[0, head]])
