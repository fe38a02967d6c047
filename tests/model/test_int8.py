"""model.weights=int8: products of the kernel, models in 8 bits, and where they are refused.

The references are the products of the same codes, made here of the weights, in float64.
"""

# Legend: R rows, I input features, O output features, B batch, S tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from runahead import Engine, GenerationOptions, Model, Ranks, RanksOptions
from runahead.config import Device, DType, Fuse, ModelName, ModelOptions, Weights
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.model import loading
from runahead.model.fingerprint import model_fingerprint
from runahead.model.layers.int8 import (
    DecodedWeight,
    EncodedWeight,
    Int8Linear,
    encode_linears,
    encoded_layers,
    encoded_share,
    linears,
    unrounded,
    wrong_product,
)
from runahead.model.loading import building, kernels
from runahead.model.loading.sharing import bytes_of
from runahead.model.shares import load_model, shard_model
from tests.families import build, prompt, save_tiny_config
from tests.needs import TEST_KERNELS, missing

CPU = torch.device("cpu")

FAMILIES = ("llama", "phi", "gemma2", "qwen3_moe", "jetmoe", "gptj", "lfm2")

WHOLE = ("mlp.gate", "router", "router.layer", "self_attention.kv_proj")
"""Ends of the names of layers that stay as they are: routers, and JetMoE's kv_proj, which lies beside experts."""

ROUTERS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "jetmoe": ({}, "router.layer", ("self_attention.kv_proj",)),
    "gemma4_text": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        *("router.proj", ("per_layer_input_gate", "per_layer_projection")),
    ),
}
"""Families whose routers hold a linear layer: sizes, its name, and names of layers that stand beside experts."""

IN_ROUTERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "dbrx": ({"attn_config": {"rope_theta": 1e4}}, ["ffn.router.layer"], ["attn.Wqkv"]),
    "hunyuan_v1_moe": ({"head_dim": 128, "num_experts": 4}, ["mlp.gate.wg"], ["q_proj", "shared_mlp.up_proj"]),
    "afmoe": ({"num_hidden_layers": 2}, ["mlp.router.gate"], ["self_attn.q_proj", "shared_experts.up_proj"]),
    "longcat_flash": ({"num_layers": 1}, ["router.classifier"], ["mlps.0.up_proj"]),
    "doge": ({"is_moe": True}, ["mlp.router_gate"], ["mlp.up_proj"]),
    "zaya": ({}, ["gate.down_proj", "gate.router_mlp.fc1", "gate.router_mlp.out_proj"], ["lm_head"]),
}
"""Of more such families: options of a config, ends of names of routers' layers, and of others that can be encoded."""


def load_kernels() -> Path:
    """Load the kernels of the tests. Returns: their library, for ranks, which may have started with another folder."""
    library = kernels.build(cache_folder() / TEST_KERNELS)
    operators.load(library)
    return library


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if kernels.unsupported() or kernels.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    load_kernels()


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Random numbers, some of them far larger than the others."""
    generator = torch.Generator().manual_seed(seed + sum(size))
    found = torch.randn(*size, generator=generator)
    return torch.where(torch.rand(*size, generator=generator) < 0.02, 30 * found, found)


def product(
    x_RI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    zero_point: int = 128,
    neighbour: bool = False,
    signed: bool = False,
) -> Tensor:
    """The product in float64, from its definition; what the options say is wrong unless they are left out.

    Args:
        zero_point: that sums are corrected by, of unsigned codes that are 128 larger.
        neighbour: take the scale of the next output feature.
        signed: read unsigned codes as signed ones.
    """
    weight_OI = weight_OI.float()
    scales_O = weight_OI.abs().amax(dim=1) / 127
    codes_OI = (weight_OI / torch.where(scales_O == 0, 1.0, scales_O)[:, None]).round().double()
    found = torch.zeros(len(x_RI), len(weight_OI), dtype=torch.float64)
    for group in range(0, x_RI.shape[1], 64):
        x_Rg = x_RI[:, group : group + 64].float()
        largest_R1 = x_Rg.abs().amax(dim=1, keepdim=True)
        factor_R1 = torch.where(largest_R1 > 0, torch.tensor(127.0) / largest_R1, 0.0)
        codes_Rg = (x_Rg.double() * factor_R1.double()).round() + 128
        codes_Rg = torch.where(codes_Rg > 127, codes_Rg - 256, codes_Rg) if signed else codes_Rg
        codes_Og = codes_OI[:, group : group + 64]
        sums_RO = codes_Rg @ codes_Og.T - zero_point * codes_Og.sum(dim=1)
        found += (largest_R1 / 127).double() * sums_RO
    found *= (scales_O.roll(-1) if neighbour else scales_O).double()
    return found if bias_O is None else found + bias_O.double()


WRONG: dict[str, dict[str, Any]] = {
    "zero point off by one": {"zero_point": 129},
    "scale of the neighbouring channel": {"neighbour": True},
    "signed activations": {"signed": True},
}


def computed(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    encoded = EncodedWeight.of(weight_OI)
    return operators.linear_int8(x, encoded.codes, encoded.sums, encoded.scales_O, bias_O)


def assert_same(found: Tensor, known: Tensor) -> None:
    """Groups are added in float32: at most 50 of them, of numbers that are some times larger than their sum."""
    rounding = 3e-6 if found.dtype is torch.float32 else 1e-2
    assert (found.double() - known).abs().max() <= rounding * known.abs().max()


inputs = st.integers(1, 80) | st.sampled_from([127, 128, 129, 576, 1000])
outputs = st.integers(1, 70) | st.sampled_from([96, 97])
rows = st.integers(1, 14) | st.sampled_from([95, 97, 481])


class TestProducts:
    @given(rows, inputs, outputs, st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
    def test_are_those_of_the_codes(
        self, num_rows: int, num_inputs: int, num_outputs: int, biased: bool, dtype: torch.dtype
    ) -> None:
        x_RI, weight_OI = numbers(num_rows, num_inputs).to(dtype), numbers(num_outputs, num_inputs, seed=1)
        bias_O = numbers(num_outputs) if biased else None
        found = computed(x_RI, weight_OI, bias_O)
        assert found.dtype == dtype
        assert_same(found, product(x_RI, weight_OI, bias_O))

    @pytest.mark.parametrize("wrong", WRONG)
    def test_are_told_from_others(self, wrong: str) -> None:
        x_RI, weight_OI = numbers(20, 200), numbers(70, 200, seed=1)
        with pytest.raises(AssertionError):
            assert_same(computed(x_RI, weight_OI), product(x_RI, weight_OI, **WRONG[wrong]))

    def test_of_whole_numbers_are_exact(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x_RI = torch.randint(-127, 128, (33, 320), generator=generator).float()
        weight_OI = torch.randint(-127, 128, (65, 320), generator=generator).float()
        x_RI[:, ::64] = weight_OI[:, 0] = 127  # so that all scales are 1
        assert torch.equal(computed(x_RI, weight_OI).double(), x_RI.double() @ weight_OI.double().T)

    def test_of_the_largest_codes_do_not_overflow(self) -> None:
        ones = torch.ones(1, 4096)
        for sign in (1, -1):
            assert computed(sign * ones, ones.expand(40, -1)).unique().tolist() == [pytest.approx(sign * 4096)]

    def test_keep_what_is_no_number_in_its_row(self) -> None:
        for wrong in (torch.nan, torch.inf, -torch.inf):
            x_RI = numbers(9, 100)
            x_RI[4, 70] = wrong
            found = computed(x_RI, numbers(40, 100))
            assert found[4].isnan().all()
            assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()

    def test_of_zeros_and_of_no_rows_are_zeros_and_none(self) -> None:
        weight_OI = torch.cat([torch.zeros(1, 70), numbers(2, 70)])
        assert torch.equal(computed(torch.zeros(3, 70), weight_OI), torch.zeros(3, 3))
        assert torch.equal(computed(numbers(3, 70), weight_OI)[:, 0], torch.zeros(3))
        assert computed(torch.empty(2, 0, 70), weight_OI).shape == (2, 0, 3)

    def test_have_the_bits_of_each_row_alone_with_any_threads(self) -> None:
        x_RI, weight_OI, before = numbers(500, 576), numbers(1000, 576), torch.get_num_threads()
        found = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(computed(x_RI, weight_OI))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(each, found[0]) for each in found)
        for row in (0, 5, 96, 479, 480, 499):
            assert torch.equal(computed(x_RI[row], weight_OI), found[0][row])
        assert torch.equal(computed(x_RI.view(5, 100, 576).transpose(0, 1), weight_OI)[7, 3], found[0][307])

    def test_are_an_operator_of_torch(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            encoded = EncodedWeight.of(numbers(40, 70))
            given = (numbers(2, 3, 70).to(dtype), encoded.codes, encoded.sums, encoded.scales_O, numbers(40))
            torch.library.opcheck(
                torch.ops.runahead.linear_int8.default, given, test_utils=["test_schema", "test_faketensor"]
            )

    @pytest.mark.parametrize(
        ("x", "message"),
        [(torch.ones(3, 80), "are not of 80 input"), (torch.ones(3, 70, dtype=torch.float64), "are not to be had")],
    )
    def test_refuse_what_does_not_fit(self, x: Tensor, message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            computed(x, numbers(40, 70)) if x.shape[1] == 70 else operators.linear_int8(x, *_parts(), None)


def _parts() -> tuple[Tensor, Tensor, Tensor]:
    encoded = EncodedWeight.of(numbers(40, 70))
    return encoded.codes, encoded.sums, encoded.scales_O


def plain_twin(family: str, **wrong: Any) -> nn.Module:
    """transformers' module with the products of the definition above, in place of linear layers."""
    module = build(family, dtype=torch.float32, attention="eager")

    def multiply(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: (
            product(x.flatten(0, -2), layer.weight, layer.bias, **wrong).unflatten(0, x.shape[:-1]).to(x.dtype)
        )

    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and not name.endswith(WHOLE):
            layer.forward = multiply(layer)  # type: ignore[method-assign, assignment]
    return module


def last_logits(ranks: Ranks, library: Path, family: str, ids: list[int], num_new: int) -> tuple[list[int], Tensor]:
    """New token ids of a model in 8 bits, and logits (V) after the prompt on the last rank."""
    operators.load(library)
    module = build(family, dtype=torch.float32)
    encode_linears(module)
    found = list[Tensor]()
    model = Model(module)
    forward = model.forward
    model.forward = lambda *given, **more: found.append(forward(*given, **more)) or found[-1]  # type: ignore[method-assign, func-returns-value]
    batch = Engine(model, ranks).generate([ids], GenerationOptions(max_new_tokens=num_new, ignore_eos=True))
    return batch.generations[0].new_token_ids, found[0][0] if found else torch.empty(0)


TOLERANCE = 2e-2
"""Part of the logits' spread. Attention rounds in another order, which may move a number by one of 127 of its group."""


def off(found: Tensor, known: Tensor) -> float:
    return ((found - known).abs().max() / known.std()).item()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Output features of each weight, or part of one, that is decoded."""
    found, decode = list[int](), EncodedWeight.decoded

    def noted(self: EncodedWeight, num_inputs: int) -> Tensor:
        found.append(len(self.scales_O))
        return decode(self, num_inputs)

    monkeypatch.setattr(EncodedWeight, "decoded", noted)
    return found


class TestModels:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_compute_with_the_numbers_of_the_codes(self, family: str) -> None:
        ids = prompt(60)
        ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
        _, logits_V = last_logits(ranks, load_kernels(), family, ids, 1)
        with torch.inference_mode():
            known_V = plain_twin(family)(input_ids=torch.tensor([ids])).logits[0, -1]
        assert off(logits_V, known_V) < TOLERANCE

    @pytest.mark.parametrize("wrong", WRONG)
    def test_are_told_from_others(self, wrong: str) -> None:
        ids = prompt(60)
        ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
        _, logits_V = last_logits(ranks, load_kernels(), "llama", ids, 1)
        with torch.inference_mode():
            others_V = plain_twin("llama", **WRONG[wrong])(input_ids=torch.tensor([ids])).logits[0, -1]
        assert off(logits_V, others_V) > 5 * TOLERANCE

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
    def test_answer_alike_on_one_and_two_ranks(self, rank_pools: Any, family: str) -> None:
        ids = prompt(70, seed=1)
        [[one, _]] = rank_pools.run(1, last_logits, load_kernels(), family, ids, 8)
        two = rank_pools.run(2, last_logits, load_kernels(), family, ids, 8)
        assert [answer for answer, _ in two] == [one, one]

    @pytest.mark.parametrize("family", ROUTERS)
    def test_keep_all_that_chooses_experts(self, family: str) -> None:
        sizes, routers, beside = ROUTERS[family]
        module = build(family, dtype=torch.float32, **sizes)
        plain = {name for name, layer in module.named_modules() if type(layer) is nn.Linear}
        encode_linears(module)
        left = {name for name, layer in module.named_modules() if type(layer) is nn.Linear}
        assert left and left == {name for name in plain if name.endswith((routers, *beside))}
        assert any(name.endswith(routers) for name in left)

    def test_keep_a_gate_that_holds_its_layer(self) -> None:
        """HunYuan's experts have it; the shared expert beside it is encoded, and so is the `gate` of a plain MLP."""
        block = nn.ModuleDict(
            {
                "gate": nn.ModuleDict({"wg": nn.Linear(8, 4)}),
                "experts": nn.Module(),
                "shared_expert": nn.ModuleDict({"gate": nn.Linear(8, 8), "up": nn.Linear(8, 8)}),
            }
        )
        encode_linears(block)
        names = {name for name, layer in block.named_modules() if isinstance(layer, Int8Linear)}
        assert names == {"shared_expert.gate", "shared_expert.up"}

    def test_share_is_of_the_weights_numbers(self) -> None:
        module = build("llama", dtype=torch.float32)
        layers = [layer.weight.numel() for layer in module.modules() if type(layer) is nn.Linear]
        numbers = sum(parameter.numel() for parameter in module.parameters())
        encode_linears(module)
        assert encoded_share(module) == sum(layers) / numbers

    def test_keep_routers_embeddings_and_experts(self) -> None:
        module = build("qwen3_moe", dtype=torch.float32)
        given = module.get_input_embeddings().weight
        encode_linears(module)
        layers = {name for name, layer in module.named_modules() if isinstance(layer, Int8Linear)}
        assert any(name.endswith("q_proj") for name in layers) and "lm_head" in layers
        assert not any("gate" in name.split(".") or "experts" in name for name in layers)
        assert module.get_input_embeddings().weight is given

    @pytest.mark.parametrize("family", IN_ROUTERS)
    def test_keep_linear_layers_in_routers(self, family: str) -> None:
        more, routers, others = IN_ROUTERS[family]
        if family not in CONFIG_MAPPING:
            pytest.skip(f"transformers has no {family}")
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{"num_hidden_layers": 2} | more))
        every = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
        taken = set(linears(module))
        names = [name for name in every if module.get_submodule(name) in taken]
        for end in routers:
            assert any(name.endswith(end) for name in every), every
            assert not any(name.endswith(end) for name in names)
        for end in others:
            assert any(name.endswith(end) for name in names), names

    def test_are_read_as_numbers(self) -> None:
        """Policies that read weights, and what is not computed by the layer itself."""
        module = build("llama", dtype=torch.float32)
        given = {name: layer.weight.clone() for name, layer in module.named_modules() if type(layer) is nn.Linear}
        encode_linears(module)
        for name, layer in module.named_modules():
            if name in given:
                step_O1 = given[name].abs().amax(dim=1, keepdim=True) / 127
                assert ((layer.weight - given[name]).abs() <= 0.501 * step_O1).all()
                assert layer.weight.shape == given[name].shape
        projections = Model(module).output_projections
        assert torch.equal(projections[0], module.model.layers[0].self_attn.o_proj.weight)

    def test_decode_no_weight_for_its_size_or_dtype(self, decoded: list[int]) -> None:
        """As families' code asks for it in each forward, and the search for output projections of each layer."""
        module = build("llama", dtype=torch.bfloat16)
        encode_linears(module)
        weight = module.lm_head.weight
        assert (weight.shape, weight.dtype, weight.ndim, weight.device) == ((97, 32), torch.bfloat16, 2, CPU)
        assert numbers(2).to(weight.dtype).dtype is torch.bfloat16 and decoded == []
        model = Model(module)
        decoded.clear()
        kept = model.output_projections
        assert decoded == [32] * len(decoded) and 3 <= len(decoded) <= 6  # both forms of o_proj, in three layers
        assert all(isinstance(each, DecodedWeight) for each in kept)

    def test_are_decoded_a_part_at_a_time(self, decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        layer, x = nn.Linear(70, 1300).requires_grad_(False), numbers(3, 70)
        Int8Linear.take(layer)
        known = x.double() @ layer.weight.double().T + layer.bias.double()
        decoded.clear()
        with unrounded(layer):
            torch.testing.assert_close(layer(x).double(), known, rtol=0, atol=1e-4)
        assert wrong_product(layer, lambda: layer(x)) == ""
        assert decoded == 2 * [512, 512, 276]
        right = operators.linear_int8
        for place, factor in ((0, 1.5), (600, 1.5), (1299, 1.5), (700, torch.nan)):
            factors = torch.ones(1300)
            factors[place] = factor
            monkeypatch.setattr(operators, "linear_int8", lambda *given, by=factors: by * right(*given))
            assert wrong_product(layer, lambda: layer(x)).startswith(" (off by")

    @pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
    def test_predict_queries_as_the_layers_compute_them(self, family: str) -> None:
        """Of the layer's own input, in 8 bits: the queries that the layer itself passes on."""
        module = build(family, dtype=torch.float32)
        encode_linears(module)
        model = Model(module)
        prediction = model.query_prediction
        assert all(each is not None for each in prediction._projections)
        recording, unlike = model._recorded(20), 0
        for layer, q_BNCH, *_ in recording.calls:
            found = prediction.queries(layer, recording.inputs[layer])
            torch.testing.assert_close(found, q_BNCH, rtol=0, atol=1e-4 * float(q_BNCH.abs().max()))
            with unrounded(module):
                others = prediction.queries(layer, recording.inputs[layer])
            unlike += bool((others - q_BNCH).abs().max() > 1e-3 * q_BNCH.abs().max())
        assert unlike == len(recording.calls)
        if family == "opt":  # no rotation between weights and queries
            assert prediction.folded(0, torch.eye(8).expand(len(recording.calls[0][2][0]), 8, 8)) is not None

    def test_have_another_fingerprint_and_fewer_bytes(self) -> None:
        plain, module = (build("llama", dtype=torch.float32) for _ in range(2))
        encode_linears(module)
        assert model_fingerprint(module) != model_fingerprint(plain)
        again = build("llama", dtype=torch.float32)
        again.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # the same codes by other scales
        encode_linears(again)
        assert model_fingerprint(module) != model_fingerprint(again)
        layer, encoded = nn.Linear(1000, 2000), nn.Linear(1000, 2000)
        Int8Linear.take(encoded)
        assert bytes_of(encoded) < 0.27 * bytes_of(layer)
        assert bytes_of(encoded) - encoded.bias.nbytes == EncodedWeight.num_bytes(2000, 1000)

    def test_of_a_large_layer_are_those_of_its_parts(self) -> None:
        weight_OI = numbers(4100, 9)
        whole, first = EncodedWeight.of(weight_OI), EncodedWeight.of(weight_OI[:32])
        assert torch.equal(whole.codes[:1], first.codes) and torch.equal(whole.sums[:1], first.sums)
        assert len(whole.codes) == 129 and (whole.decoded(9) - weight_OI).abs().max() <= weight_OI.abs().max() / 250

    def test_give_gradients_of_their_numbers(self) -> None:
        layer = nn.Linear(70, 40).requires_grad_(False)
        Int8Linear.take(layer)
        x = numbers(3, 70).requires_grad_()
        layer(x).sum().backward()
        assert x.grad is not None and torch.allclose(x.grad[0], layer.weight.sum(dim=0), atol=1e-5)

    def test_are_checked_at_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = build("llama", dtype=torch.float32)
        encode_linears(module)
        assert wrong_product(module, lambda: module(input_ids=torch.tensor([prompt(9)]))) == ""
        right = operators.linear_int8
        monkeypatch.setattr(operators, "linear_int8", lambda x, c, s, scales, b: right(x, c, s, scales.roll(1), b))
        with pytest.raises(ValueError, match=r"the kernel for 8-bit weights gives other products .*_proj"):
            Model(module)

    def test_are_why_nothing_is_fused(self) -> None:
        module = build("phi", dtype=torch.float32)
        encode_linears(module)
        with pytest.warns(UserWarning, match=r"no effect on model phi \(phi\) \(model\.weights=int8"):
            Model(module, fuse=Fuse.on)


class TestLoading:
    @pytest.fixture
    def options(self, tmp_path: Path) -> ModelOptions:
        save_tiny_config(tmp_path)
        return ModelOptions(name=ModelName.random, config=str(tmp_path), weights=Weights.int8, dtype=DType.float32)

    def test_rounds_and_tells(self, options: ModelOptions) -> None:
        model = load_model(options, Ranks.start(RanksOptions(device=Device.cpu, threads=1)))
        assert model.weights is Weights.int8 and len(encoded_layers(model.module)) == 4 * 7 + 1
        assert model.stored_as.startswith("int8 (") and model.memory is not None
        assert model.memory.weights_bytes == bytes_of(model.module)

    @pytest.mark.parametrize("is_mapped", [True, False])
    def test_asks_for_the_room_that_it_takes(
        self, is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beside mapped weights all codes; of others each layer is freed before the next, so those of one layer."""
        module = build("llama", dtype=torch.float32)
        module.save_pretrained(tmp_path)
        weights = sum(parameter.nbytes for parameter in module.parameters())
        if not is_mapped:
            module.bfloat16().save_pretrained(tmp_path)
        seen = []
        monkeypatch.setattr(building, "require_room", lambda footprint, device, **keywords: seen.append(footprint))
        options = ModelOptions(name=ModelName.hf, path=str(tmp_path), weights=Weights.int8, dtype=DType.float32)
        loaded = loading.load(options, device=CPU, attn_implementation="eager")
        codes = [sum(each.nbytes for each in (x.codes, x.sums, x.scales)) for x in encoded_layers(loaded.module)]
        assert seen[0].copied == (sum(codes) if is_mapped else weights + 2 * max(codes))

    def test_is_refused_in_float16(self, options: ModelOptions) -> None:
        options.dtype = DType.float16
        with pytest.raises(ValueError, match=r"float32 or bfloat16, not float16; use model\.dtype"):
            loading.load(options, device=CPU, attn_implementation="eager")

    def test_is_refused_without_kernels(self, options: ModelOptions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "is_loaded", lambda: False)
        monkeypatch.setattr(loading, "load_if_built", lambda: f"none are built; {kernels.REMEDY}")
        with pytest.raises(ValueError, match=r"weights=int8 needs kernels: none are built; python -m launch\.kernels"):
            loading.load(options, device=CPU, attn_implementation="eager")

    def test_is_refused_of_models_without_linear_layers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_tiny_config(tmp_path)
        options = ModelOptions(name=ModelName.random, config=str(tmp_path), weights=Weights.int8)
        monkeypatch.setattr("runahead.model.layers.int8.linears", lambda module: [])
        with pytest.raises(ValueError, match="of which .* has none"):
            loading.load(options, device=CPU, attn_implementation="eager")

    def test_is_refused_in_shares(self) -> None:
        model: Any = SimpleNamespace(weights=Weights.int8)
        with pytest.raises(ValueError, match=r"model\.weights=int8 rounds whole weights"):
            shard_model(model, SimpleNamespace(num_shares=2))  # type: ignore[arg-type]
