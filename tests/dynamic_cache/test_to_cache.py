"""Prompts that ranks have computed are answered by transformers as if it had computed them itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from policies.snapkv import SnapKV
from runahead import (
    DecodeOptions,
    Engine,
    GenerationOptions,
    PrefillOptions,
    PrefixTree,
    Ranks,
    RanksOptions,
)
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.config import CacheOptions, Carrier, DecodeName, PrefillName
from runahead.dynamic_cache import checked
from runahead.dynamic_cache.checked import CheckedCache
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.dynamic_cache import tasks
from tests.families import VOCAB_SIZE, WINDOW, prompt, throughout
from tests.ranks.tasks import tiny_model

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3_text"]
IDS = prompt(70)
SHORTER = prompt(50, seed=3)
BOUNDS = {1: (0, 70), 2: (0, 41, 70), 3: (0, 33, 55, 70)}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_k": 20},
    "beams": {"num_beams": 4, "do_sample": False},
    "several sampled": {"do_sample": True, "num_return_sequences": 3},
}


def transformers_alone(family: str, prompts: list[list[int]], options: dict[str, Any]) -> tasks.Answer:
    ids, mask = tasks.padded(prompts)
    torch.manual_seed(7)
    with throughout(torch.float64):
        return tasks.answered(tasks.reference(family).generate(ids, attention_mask=mask, **tasks.asked(options)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [[IDS], [SHORTER, IDS]], ids=["one row", "two rows"])
def test_answers_equal_those_of_transformers_alone(
    rank_pools: RankPools, family: str, size: int, prompts: list[list[int]]
) -> None:
    each = rank_pools.run(size, tasks.generate_with, family, prompts, BOUNDS[size], [*WAYS.values()])
    assert all(found == [None] * len(WAYS) for found in each[:-1])
    for options, found in zip(WAYS.values(), each[-1], strict=True):
        ids, logits = transformers_alone(family, prompts, options)
        assert found is not None and found[0] == ids, options
        torch.testing.assert_close(found[1], logits, atol=1e-9, rtol=0)  # float64; filters are minus infinity in both


@pytest.mark.parametrize(
    "prefill",
    [
        PrefillOptions(name=PrefillName.tsp),
        PrefillOptions(name=PrefillName.zigzag),
        PrefillOptions(name=PrefillName.single, chunk_tokens=16),
        PrefillOptions(carrier=Carrier.copy),
    ],
    ids=lambda options: f"{options.name.name} {options.carrier.name}",
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_other_prefills_hand_over_the_same(rank_pools: RankPools, family: str, prefill: PrefillOptions) -> None:
    each = rank_pools.run(2, tasks.generate_with, family, [IDS], BOUNDS[2], [WAYS["beams"]], prefill)
    [[found]] = [answers for answers in each if answers != [None]]
    ids, logits = transformers_alone(family, [IDS], WAYS["beams"])
    assert found is not None and found[0] == ids
    torch.testing.assert_close(found[1], logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_model_of_the_engine_answers_with_the_attention_of_transformers_and_has_ours_again(family: str) -> None:
    with Ranks.start(RanksOptions()) as ranks:
        [found] = tasks.generate_with(ranks, family, [SHORTER, IDS], BOUNDS[1], [WAYS["sampled"]], is_own=True)
    ids, logits = transformers_alone(family, [SHORTER, IDS], WAYS["sampled"])
    assert found is not None and found[0] == ids
    torch.testing.assert_close(found[1], logits, atol=1e-9, rtol=0)
    assert tiny_model(family).module.config._attn_implementation == "runahead"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layers_with_windows_hold_what_is_seen_and_count_all(rank_pools: RankPools, size: int) -> None:
    [found] = [each for each in rank_pools.run(size, tasks.lengths, "gemma3_text", [IDS], BOUNDS[size]) if each]
    assert {held for _, held in found} == {WINDOW - 1, 69} and {counted for counted, _ in found} == {69}


@pytest.mark.parametrize("bounds", [(0, 65, 70), (0, 60, 70)], ids=str)
def test_a_chunk_that_has_begun_anew_hides_what_the_last_rank_lacks(
    rank_pools: RankPools, bounds: tuple[int, ...]
) -> None:
    """Tokens from 64 on see none before in these layers, of which transformers keeps the last 15 whatever they see."""
    ways = [WAYS["greedy"], WAYS["beams"]]
    each = rank_pools.run(2, tasks.generate_with, "llama4_text", [IDS], bounds, ways)
    for options, found in zip(ways, each[-1], strict=True):
        ids, logits = transformers_alone("llama4_text", [IDS], options)
        assert found is not None and found[0] == ids
        torch.testing.assert_close(found[1], logits, atol=1e-9, rtol=0)


def test_the_memory_of_the_rank_is_freed_layer_by_layer() -> None:
    """So that no more than a layer or two of it are held twice."""
    model, alive = tiny_model("llama"), []
    slabs = Slabs.empty(
        model.kv_shapes,
        batch=1,
        spans=[(0, 9)] * len(model.kv_shapes),
        num_slabs=len(model.kv_shapes),
        device=torch.device("cpu"),
    )
    memory = [weakref.ref(slab) for slab in slabs.by_layer]
    fill, cache = checked.fill, KVCache(slabs)

    def counting(*args: Any) -> None:
        alive.append(sum(each() is not None for each in memory))
        fill(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "fill", counting)
        checked.checked_cache(cache, model, num_tokens=9, pads=[0])
    assert alive == [*range(len(memory), 0, -1)]


def test_what_a_tree_has_of_a_prompt_makes_no_difference() -> None:
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        engine = Engine(tiny_model("llama"), ranks, tree=PrefixTree(10_000_000))
        engine.generate([IDS], GenerationOptions(max_new_tokens=2))
        torch.manual_seed(7)
        output = engine.generate_with(tasks.reference("llama"), [IDS], **tasks.asked(WAYS["sampled"]))
    assert tasks.answered(output)[0] == transformers_alone("llama", [IDS], WAYS["sampled"])[0]


def given(ids: list[int] = IDS) -> CheckedCache:
    return cache_of("llama", [ids])


def cache_of(family: str, prompts: list[list[int]]) -> CheckedCache:
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        found = Engine(tiny_model(family), ranks).to_cache(prompts)
    assert found is not None
    return found


def generate(cache: DynamicCache, prompts: list[list[int]], family: str = "llama", **more: Any) -> list[list[int]]:
    ids = torch.tensor(prompts) if len({*map(len, prompts)}) == 1 else tasks.padded(prompts)[0]
    module = more.pop("module", tasks.reference(family))
    with throughout(torch.float64):
        sequences = module.generate(ids, past_key_values=cache, max_new_tokens=4, **{"pad_token_id": None} | more)
    found: list[list[int]] = sequences.tolist()
    return found


def test_a_text_that_goes_on_after_the_prompt_is_answered() -> None:
    text = [*IDS, *prompt(9, seed=5)]
    assert generate(given(), [text], eos_token_id=None) == generate(DynamicCache(), [text], eos_token_id=None)


def test_a_prompt_of_one_token_leaves_the_cache_empty() -> None:
    assert given(IDS[:1]).get_seq_length() == 0
    assert generate(given(IDS[:1]), [IDS[:1]]) == generate(DynamicCache(), [IDS[:1]])


OTHER = [*IDS[:-1], (IDS[-1] + 1) % VOCAB_SIZE]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: generate(given(), [OTHER]),
        lambda: generate(given(), [IDS[:-1]]),  # as many tokens as the cache has: generate reads them all again
        lambda: generate(given(SHORTER), [IDS]),
        lambda: generate(cache_of("llama", [SHORTER, IDS]), [SHORTER, IDS]),  # without their mask
    ],
    ids=["other ids", "without the last token", "another prompt's cache", "rows without a mask"],
)
def test_a_cache_with_other_tokens_or_places_is_an_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is not the last one of the prompt at its place"):
        wrong()


def test_what_transformers_does_with_a_cache_of_its_own_in_these_cases_is_silent_and_wrong() -> None:
    """So the errors above are ours, and are needed."""
    right = generate(DynamicCache(), [IDS])
    plain = DynamicCache()
    with throughout(torch.float64):
        tasks.reference("llama")(torch.tensor([IDS]), past_key_values=plain)
    assert generate(plain, [IDS]) != right


def test_attention_or_weights_that_are_not_the_models_are_an_error() -> None:
    from tests.families import rounded

    other = rounded("llama")
    other.set_attn_implementation("eager")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="layer 1 of the model computes other keys"):
        generate(given(), [IDS], module=other)


def test_another_dtype_or_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="load the same model in the same dtype"):
        tasks.reference("llama", torch.float32)(torch.tensor([IDS[-1:]]), past_key_values=given())
    with pytest.raises(ValueError, match="with this cache|computes other keys"):
        generate(given(), [IDS], module=tasks.reference("gemma2"))


def test_a_model_of_an_engine_says_how_it_answers() -> None:
    with pytest.raises(ValueError, match=r"runs by itself in Engine\.generate_with"):
        generate(given(), [IDS], module=tiny_model("llama").module)


def test_layers_of_other_kinds_are_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "LAYERS", (DynamicLayer,))
    with Ranks.start(RanksOptions()) as ranks:
        engine = Engine(tiny_model("gemma3_text"), ranks)
        monkeypatch.setattr(engine.prefills, "ready", lambda *_, **__: pytest.fail("the prompt was begun"))
        with pytest.raises(ValueError, match=r"has 3 layers, of them DynamicSlidingWindowLayer, .* let Runahead"):
            engine.to_cache([IDS])


@pytest.mark.parametrize(
    ("settings", "family", "reason"),
    [
        ({"policies": RankPolicies.everywhere([SnapKV(budget=40)])}, "llama", "may leave some out"),
        ({"policies": RankPolicies(storage=CacheOptions(bits=4))}, "llama", "cache.bits"),
        ({"decode": DecodeOptions(name=DecodeName.sharded)}, "llama", "decode=sharded"),
        ({}, "gemma3n_text", "keys and values of other layers"),
        ({}, "qwen3_next", "hold states"),
    ],
    ids=["policy", "bits", "sharded", "shared", "states"],
)
def test_what_has_no_such_cache_is_refused_before_work(settings: dict[str, Any], family: str, reason: str) -> None:
    with Ranks.start(RanksOptions()) as ranks, throughout(torch.float64):
        engine = Engine(tiny_model(family), ranks, **settings)
        with pytest.raises(ValueError, match=reason):
            engine.to_cache([IDS])
