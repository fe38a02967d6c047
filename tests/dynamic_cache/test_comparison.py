"""Keys and values that differ by rounding are the same, in deep models of few bits, too; others are not."""

# Legend: B batch, K kv heads, H key dim, X = H + V, n tokens.

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from runahead import Conversation, Engine, Model, Ranks, RanksOptions
from runahead.config import Weights
from runahead.dynamic_cache.comparison import kv_differ
from runahead.kernels import operators
from runahead.model.checks.logits_check import differ
from runahead.model.layers.int8 import encode_linears
from runahead.model.loading import kernels
from tests.families import VOCAB_SIZE, build, prompt
from tests.model.test_int8 import load_kernels
from tests.needs import missing

IDS = prompt(70)
OTHER = [*IDS[:-1], (IDS[-1] + 1) % VOCAB_SIZE]
EARLIER = [(IDS[0] + 1) % VOCAB_SIZE, *IDS[1:]]

HEADS, KEY_DIM = 4, 16


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def with_large_channel() -> Tensor:
    """Keys and values (n, K, X), of which one channel of one head is about 40 where all others are about 1."""
    kv_nKX = numbers(9, HEADS, 2 * KEY_DIM)
    kv_nKX[:, 1, 3] += 40
    return kv_nKX.bfloat16()


def ulps_off(x: Tensor, num: int) -> Tensor:
    """Each number as many numbers of its dtype further from zero."""
    return (x.view(torch.int16) + num).view(x.dtype)


class TestFewBits:
    def test_rounding_of_a_channel_that_is_far_larger_is_no_difference(self) -> None:
        given = with_large_channel()
        computed = ulps_off(given, 4)
        assert differ(given, computed, torch.bfloat16)  # by the largest difference they would be others
        assert not kv_differ(given, computed, KEY_DIM, in_few_bits=True)

    def test_a_head_of_rounding_alone_is_no_difference(self) -> None:
        given = with_large_channel()
        given[:, 2] = 1e-4 * numbers(9, 2 * KEY_DIM).bfloat16()
        computed = given.clone()
        computed[:, 2] = 1e-4 * numbers(9, 2 * KEY_DIM, seed=1).bfloat16()
        assert not kv_differ(given, computed, KEY_DIM, in_few_bits=True)

    @pytest.mark.parametrize("head", range(HEADS))
    @pytest.mark.parametrize(("part", "name"), [(slice(KEY_DIM), "keys"), (slice(KEY_DIM, None), "values")])
    def test_another_head_of_one_token_is_found(self, head: int, part: slice, name: str) -> None:
        given = numbers(9, HEADS, 2 * KEY_DIM).bfloat16()
        computed = given.clone()
        computed[5, head, part] = numbers(KEY_DIM, seed=1).bfloat16()
        assert kv_differ(given, computed, KEY_DIM, in_few_bits=True).startswith(f"{name} are off by")

    def test_values_are_not_compared_by_the_size_of_keys(self) -> None:
        given = numbers(9, HEADS, 2 * KEY_DIM).bfloat16()
        given[..., :KEY_DIM] *= 100
        computed = given.clone()
        computed[..., KEY_DIM:] = numbers(9, HEADS, KEY_DIM, seed=1).bfloat16()
        assert kv_differ(given, computed, KEY_DIM, in_few_bits=True).startswith("values are off by")
        given, computed = given.double(), computed.double()
        assert kv_differ(given, computed, KEY_DIM, in_few_bits=False).startswith("values are off by")

    def test_what_is_no_number_is_found(self) -> None:
        given = with_large_channel()
        computed = given.clone()
        computed[3, 0, 0] = torch.nan
        assert kv_differ(given, computed, KEY_DIM, in_few_bits=True)


def test_in_many_bits_the_largest_difference_counts() -> None:
    given = with_large_channel().double()
    computed = given.clone()
    computed[5, 0, 0] += 0.02  # a head's norm is about 4
    assert kv_differ(given, computed, KEY_DIM, in_few_bits=False)
    assert not kv_differ(given, computed, KEY_DIM, in_few_bits=True)


WAYS = ["float32", "bfloat16", "float16", "int8"]


@cache
def deep(way: str, attention: str | None = None) -> PreTrainedModel:
    """A Llama of many layers, each of which adds little, and whose keys have two channels that are far larger."""
    module = build("llama", dtype=torch.float32, attention=attention, num_hidden_layers=32)
    config = module.config
    head_dim = config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        for layer in module.model.layers:
            for each in (layer.self_attn.o_proj, layer.mlp.down_proj):
                each.weight.mul_(0.005)
            for each, factor in ((layer.self_attn.q_proj, 1 / 40), (layer.self_attn.k_proj, 40)):
                rows = each.weight.view(-1, head_dim, config.hidden_size)
                rows[:, :: head_dim // 2] *= factor  # the two that are rotated together
    if way == "int8":
        encode_linears(module)
        return module
    return module.to(getattr(torch, way))


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "int8":
        if kernels.unsupported() or kernels.compiler() is None:
            missing("a processor with AVX2 and a C++ compiler")
        load_kernels()
        assert operators.linear_int8
    return name


@cache
def model_of(way: str) -> Model:
    return Model(deep(way), name=way)


@pytest.mark.parametrize("way", WAYS, indirect=True)
class TestDeepModels:
    def test_are_answered_by_another_copy_and_by_themselves(self, way: str) -> None:
        model = model_of(way)
        assert (model.weights is Weights.int8) == (way == "int8")
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        told = {"return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            expected = deep("float32", "eager")(torch.tensor([IDS])).logits[0, -1]
        with Ranks.start(RanksOptions()) as ranks:
            for module in (deep(way, "eager"), None):
                output = Engine(model, ranks).generate_with(module, [IDS], **options, **told)
                off = (output.logits[0][0] - expected).norm() / expected.norm()
                assert off < {"float32": 1e-3}.get(way, 0.2)

    def test_refuse_the_cache_of_other_ids_or_weights(self, way: str) -> None:
        same = deep(way, "eager")
        other = deepcopy(same)
        projection = other.model.layers[20].self_attn.k_proj
        with torch.no_grad():
            (projection.scales if way == "int8" else projection.weight).mul_(1.5)
        with Ranks.start(RanksOptions()) as ranks:
            engine, options = Engine(model_of(way), ranks), {"max_new_tokens": 2, "pad_token_id": 1}
            with pytest.raises(ValueError, match="is not the last one of the prompt at its place"):
                same.generate(torch.tensor([OTHER]), past_key_values=engine.to_cache([IDS]), **options)
            with pytest.raises(ValueError, match="layer 20 of the model computes other keys"):
                other.generate(torch.tensor([IDS]), past_key_values=engine.to_cache([IDS]), **options)

    def test_go_on_after_a_cache_of_transformers(self, way: str) -> None:
        filled = DynamicCache()
        with torch.no_grad():
            expected = deep(way, "eager")(torch.tensor([IDS]), past_key_values=filled).logits[0, -1].float()
        ours = Conversation(model_of(way))
        ours.take(filled, torch.tensor([IDS]))
        assert ours.logits_BV is not None
        off = (ours.logits_BV[0].float() - expected).norm() / expected.norm()
        assert off < {"float32": 1e-3}.get(way, 0.2)

    @pytest.mark.parametrize("ids", [OTHER, EARLIER], ids=["last", "first"])
    def test_do_not_go_on_after_other_ids(self, way: str, ids: list[int]) -> None:
        filled = DynamicCache()
        with torch.no_grad():
            deep(way, "eager")(torch.tensor([IDS]), past_key_values=filled)
        with pytest.raises(ValueError, match="computes of these ids"):
            Conversation(model_of(way)).take(filled, torch.tensor([ids]))
