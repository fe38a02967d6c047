"""LCKV models, with random weights: layers read what a later one stores, in passes over a prompt."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from launch.retrieval_heads import scores_of
from partitioner.meshes.model_size import ModelSize
from policies.snapkv import SnapKV
from runahead import Conversation, Engine, Model, PrefillOptions, Ranks, RanksOptions
from runahead.cache.attention import CausalAttention, LayerHook
from runahead.cache.rows import RowsAttention
from runahead.config import Attention, CacheOptions, Device, GenerationOptions, ModelName, ModelOptions, Speculate
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import READING, build, largest_difference, prompt, throughout
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

NUM_TOKENS, TOLERANCE = 40, 1e-9  # float64
GENERATED = [5, 7, 11, 13, 17, 19]
PLANS = {
    "lckv": ([0, 2, 2, 3], [([0], False), ([1, 2], True), ([3], False)]),
    "lckv_mixed": (
        [0, 0, 4, 0, 4, 4, 7, 7],
        [([0, 1], False), ([2, 3, 4], True), ([5], False), ([6, 7], True)],
    ),
    "cla": ([0, 1, 2, 0, 2, 5], [([0, 1, 2, 3, 4, 5], False)]),
}
"""By family: the layer that each one reads, and layers in their order with whether they run in passes."""

every_family = pytest.mark.parametrize("family", READING)


class Dense:
    """A text as the paper has it: whole matrices of scores, and in a pass the keys and values of the one before.

    Args:
        passes: over a prompt; one of no more tokens goes token by token.
        wrong: a wrong variant: "own": layers see the token itself in what they read of a later one; "first": layer 0
            reads the later one, too.
    """

    def __init__(self, family: str, passes: int, wrong: str = "", *, sequential: bool = False) -> None:
        self.module: PreTrainedModel = build(family)
        sources, plan = PLANS[family]
        self.sources = [max(sources[:-1]), *sources[1:]] if wrong == "first" else sources
        self.plan = [([0, 1, 2], True), ([3], False)] if wrong == "first" else plan
        self.passes, self.wrong, self.sequential = passes, wrong, sequential
        self.hides_own = bool(READING[family].config.get("force_nodiag"))
        config = self.module.config
        nothing = torch.zeros(config.num_key_value_heads, 0, config.head_dim, dtype=torch.float64)
        self.kv = {layer: (nothing, nothing) for layer in set(self.sources)}

    def feed(self, ids: list[int]) -> Tensor:
        """Logits (C, V) of more tokens."""
        with torch.inference_mode(), throughout(torch.float64):
            if self.sequential or len(ids) <= self.passes:
                return torch.cat([self._feed([token], 1) for token in ids])
            return self._feed(ids, self.passes)

    def _feed(self, ids: list[int], passes: int) -> Tensor:
        decoder = self.module.model
        x_CD = decoder.embed_tokens(torch.tensor(ids))
        start = next(iter(self.kv.values()))[0].shape[1]
        turns = decoder.rotary_emb(x_CD, torch.arange(start, start + len(ids))[None])
        zeros = torch.zeros(self.module.config.num_key_value_heads, len(ids), decoder.layers[0].self_attn.head_dim)
        new = {layer: (zeros.double(), zeros.double()) for layer in self.kv}
        for layers, repeats in self.plan:
            for _ in range(passes if repeats else 1):
                h_CD = x_CD
                for layer in layers:
                    h_CD = self._layer(layer, h_CD, turns, new)
            x_CD = h_CD
        self.kv = {layer: self._all(layer, new) for layer in self.kv}
        logits_CV: Tensor = self.module.lm_head(decoder.norm(x_CD))
        return logits_CV

    def _all(self, layer: int, new: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        (old_k, old_v), (new_k, new_v) = self.kv[layer], new[layer]
        return torch.cat([old_k, new_k], dim=1), torch.cat([old_v, new_v], dim=1)

    def _layer(
        self, number: int, x_CD: Tensor, turns: tuple[Tensor, Tensor], new: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        layer = self.module.model.layers[number]
        attention, h_CD, num_new = layer.self_attn, layer.input_layernorm(x_CD), len(x_CD)
        q_NCH = attention.q_proj(h_CD).view(num_new, -1, attention.head_dim).transpose(0, 1)
        if number in self.kv:
            k_KCH = attention.k_proj(h_CD).view(num_new, -1, attention.head_dim).transpose(0, 1)
            v_KCH = attention.v_proj(h_CD).view(num_new, -1, attention.head_dim).transpose(0, 1)
            new[number] = apply_rotary_pos_emb(k_KCH[None], k_KCH[None], *turns)[1][0], v_KCH
        q_NCH = apply_rotary_pos_emb(q_NCH[None], q_NCH[None], *turns)[0][0]
        source = self.sources[number]
        k_NSH, v_NSH = (each.repeat_interleave(len(q_NCH) // len(each), dim=0) for each in self._all(source, new))
        sees_own = (source <= number and not self.hides_own) or self.wrong == "own"
        start = k_NSH.shape[1] - num_new
        sees_CS = torch.ones(num_new, k_NSH.shape[1], dtype=torch.bool).tril(start if sees_own else start - 1)
        scores_NCS = (q_NCH @ k_NSH.mT * attention.scaling).masked_fill(~sees_CS, -math.inf)
        out_NCH = scores_NCS.softmax(dim=-1).nan_to_num(0.0) @ v_NSH  # a token that sees none has 0
        x_CD = x_CD + attention.o_proj(out_NCH.transpose(0, 1).reshape(num_new, -1))
        mlp_CD: Tensor = layer.mlp(layer.post_attention_layernorm(x_CD))
        return x_CD + mlp_CD


def passes_of(family: str) -> int:
    config = READING[family].config
    return int(config.get("forward_passes", 1) + config.get("backward_passes", 0))


@cache
def by_hand(family: str, *texts: tuple[int, ...], passes: int | None = None, wrong: str = "") -> list[Tensor]:
    """Logits (C, V) of a prompt, turns and tokens, one after another."""
    dense = Dense(family, passes_of(family) if passes is None else passes, wrong)
    return [dense.feed(list(ids)) for ids in texts]


def ours(model: Model, *texts: tuple[int, ...]) -> list[Tensor]:
    """The same by the model, each text in one forward."""
    cache, start, found = model.empty_cache(sum(map(len, texts))), 0, list[Tensor]()
    with throughout(model.dtype):
        for ids in texts:
            attention = CausalAttention(cache, start=start, pads=[0])
            found.append(model.forward(torch.tensor([ids]), attention, start=start, pads=[0], all_logits=True)[0])
            start += len(ids)
    return found


@every_family
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 6, NUM_TOKENS])
def test_logits_are_those_of_dense_passes(family: str, num_tokens: int) -> None:
    """Logits of a prompt, of tokens that are generated, and of a turn of several tokens."""
    texts = tuple(prompt(num_tokens)), *((token,) for token in GENERATED), tuple(prompt(9, seed=1)), (3,)
    for logits, expected in zip(ours(tiny_model(family), *texts), by_hand(family, *texts), strict=True):
        assert largest_difference(logits, expected) < TOLERANCE


@every_family
def test_as_many_passes_as_tokens_are_the_model_token_by_token(family: str) -> None:
    ids = tuple(prompt(NUM_TOKENS))
    expected = Dense(family, 1, sequential=True).feed(list(ids))
    assert largest_difference(by_hand(family, ids, passes=NUM_TOKENS - 1)[0][:-1], expected[:-1]) < TOLERANCE
    with throughout(torch.float64):
        for options in ({"forward_passes": NUM_TOKENS}, {"use_sequential": True}):
            assert largest_difference(ours(Model(build(family, **options)), ids)[0], expected) < TOLERANCE


@pytest.mark.parametrize("wrong", ["own", "first", "a pass fewer", "a pass more"])
def test_wrong_variants_are_seen(wrong: str) -> None:
    ids = tuple(prompt(NUM_TOKENS))
    passes = passes_of("lckv") + {"a pass fewer": -1, "a pass more": 1}.get(wrong, 0)
    expected = by_hand("lckv", ids, passes=passes, wrong=wrong if wrong in ("own", "first") else "")
    assert largest_difference(ours(tiny_model("lckv"), ids)[0][-1], expected[0][-1]) > 1e-3


@every_family
def test_an_engine_answers_padded_rows(family: str) -> None:
    model, given = tiny_model(family), [prompt(NUM_TOKENS), prompt(23, seed=1), prompt(4, seed=2), prompt(1, seed=3)]
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu, threads=1)))
    with throughout(torch.float64):
        batch = engine.generate(given, GenerationOptions(max_new_tokens=6, ignore_eos=True))
    for ids, generation in zip(given, batch.generations, strict=True):
        dense, new = Dense(family, passes_of(family)), list[int]()
        logits_V = dense.feed(ids)[-1]
        for token, logit in generation.first_token_logits_top5:
            assert abs(float(logits_V[token]) - logit) < TOLERANCE
        for token in generation.new_token_ids:
            new.append(int(logits_V.argmax()))
            logits_V = dense.feed([token])[-1]
        assert generation.new_token_ids == new and len(new) == 6


def test_only_layers_that_are_read_have_weights_and_memory() -> None:
    model = tiny_model("lckv_mixed")
    cache = model.empty_cache(10)
    assert model.kv_layers == [0, 4, 7] and cache.num_layers == 3
    whole = build("llama", num_hidden_layers=8)
    lacking = {name for name, _ in whole.named_parameters()} - {name for name, _ in model.module.named_parameters()}
    assert lacking == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (1, 2, 3, 5, 6) for name in "kv"
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_random_model_makes_each_part_once(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than once takes memory that no check of free memory expects. An output layer may be the embeddings."""
    made, init = list[nn.Module](), nn.Module.__init__

    def counted(module: nn.Module, *args: Any, **keywords: Any) -> None:
        made.append(module)
        init(module, *args, **keywords)

    monkeypatch.setattr(nn.Module, "__init__", counted)
    module = build("lckv_mixed", tie_word_embeddings=tied)
    spare = 2 * len(module.config.reads_kv_of)  # keys' and values' weights of layers that read others
    for kind in (nn.Linear, nn.Embedding, LlamaRMSNorm, LlamaMLP, LlamaAttention, LlamaDecoderLayer):
        held = sum(isinstance(each, kind) for each in module.modules())
        assert sum(isinstance(each, kind) for each in made) == held + (spare if kind is nn.Linear else 0), kind
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == tied


def test_a_checkpoint_of_the_published_form(tmp_path: Path) -> None:
    module = build("lckv", dtype=torch.float32)
    module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["kv_sources"]
    published = {"layer_types": "0_2_2_3", "sliding_window": 4096, "use_sequential": False, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config | published))
    options = ModelOptions(name=ModelName.hf, path=str(tmp_path))
    ids = tuple(prompt(NUM_TOKENS))
    loaded = Model.load(options, torch.device("cpu"))
    assert loaded.runs_in_passes and loaded.config.forward_passes + loaded.config.backward_passes == 5
    assert largest_difference(ours(loaded, ids)[0], by_hand("lckv", ids)[0]) < 1e-3
    changed = Model.load(
        ModelOptions(name=ModelName.hf, path=str(tmp_path), overrides={"forward_passes": 1}), torch.device("cpu")
    )
    assert largest_difference(ours(changed, ids)[0], by_hand("lckv", ids, passes=3)[0]) < 1e-3
    with pytest.raises(ValueError, match="on one stage alone, of which there is nothing to plan"):
        ModelSize.read(options)
    (tmp_path / "config.json").write_text(json.dumps(config | published | {"layer_types": "0_2s_2_3"}))
    with pytest.raises(ValueError, match="has windows or is no list of layers"):
        Model.load(options, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layer_types": "0_2_2"}, "must be a layer for each of 4"),
        ({"layer_types": "0_2_2_4"}, "must be a layer for each of 4"),
        ({"layer_types": "0_2_3_3"}, "layers read layer 2, which reads layer 3 itself"),
        ({"forward_passes": 0, "backward_passes": 0}, "must be at least 1"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        build("lckv", **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["lckv", "cla"])
@pytest.mark.parametrize("layers", [2, 3, 99])
def test_a_number_of_layers_that_the_config_does_not_describe_is_refused(
    family: str, layers: int, tmp_path: Path
) -> None:
    build(family).config.save_pretrained(tmp_path)
    options = ModelOptions(name=ModelName.random, config=str(tmp_path), layers=layers)
    with pytest.raises(ValueError, match=rf"kv_sources \[.*\] must be a layer for each of {layers}"):
        Model.load(options, torch.device("cpu"))


def test_what_cannot_be_is_refused() -> None:
    model, ranks = tiny_model("lckv"), Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    engine = Engine(model, ranks)
    with pytest.raises(ValueError, match="which policy snapkv does not support; use policy=full"):
        Engine(model, ranks, policies=RankPolicies(last=[SnapKV()]))
    with pytest.raises(ValueError, match="which reuse of prefixes does not support"):
        Engine(model, ranks, tree=PrefixTree(1 << 20))
    with pytest.raises(ValueError, match="which a conversation does not support; give each prompt as a whole"):
        Conversation(model)
    for options, name in (
        (PrefillOptions(chunk_tokens=8), "prefill.chunk_tokens=8"),
        (PrefillOptions(row_tokens=8), "prefill.row_tokens=8"),
        (PrefillOptions(attention=Attention.xattention), "prefill.attention=xattention"),
    ):
        with pytest.raises(ValueError, match=f"which {name} does not support"):
            Engine(model, ranks, prefill=options)
    with pytest.raises(ValueError, match="which cache.bits=4 does not support"):
        Engine(model, ranks, policies=RankPolicies(storage=CacheOptions(bits=4)))
    with pytest.raises(ValueError, match="which generation.speculate=lookup does not support"):
        engine.generate([prompt(9)], GenerationOptions(max_new_tokens=2, speculate=Speculate.lookup))
    with pytest.raises(ValueError, match="in a chain of 2 stages .* are sent once; use one stage"):
        check(Setup(model=model, num_stages=2))
    with pytest.raises(ValueError, match="and ranks cannot share such a model"):
        check(Setup(model=model, num_stages=1, num_shares=2))
    with pytest.raises(ValueError, match="do not see the token itself"):
        scores_of(model, prompt(9), copies=2, chunk=9)
    with pytest.raises(ValueError, match=r"do not see the token itself \(LCKV\), and no gradients; use another model"):
        model.hidden_states(torch.tensor([prompt(9)]), CausalAttention(model.empty_cache(9), start=0, pads=[0]))


def test_layers_that_read_earlier_ones_and_see_no_own_tokens_are_refused_for_that() -> None:
    """Such a model takes one pass, so a sentence of passes over later layers alone would not hold for it."""
    model = Model(build("cla", force_nodiag=True))
    assert [len(layer.group) for layer in model.decoder_layers] == [1] * 6
    for options in ({"chunk_tokens": 8}, {"row_tokens": 8}):
        with pytest.raises(ValueError, match="layers of .* do not see the token itself"):
            check(Setup(model=model, prefill=PrefillOptions(**options)))
    with pytest.raises(ValueError, match="do not see the token itself, .* in a chain of 2 stages"):
        check(Setup(model=model, num_stages=2))


def test_attention_that_passes_would_call_again_takes_none() -> None:
    """Rows with attention of their own, hooks, and ends of a forward before its logits."""
    model, ids_1C = tiny_model("lckv"), torch.tensor([prompt(9)])

    def alone(**how: Any) -> CausalAttention:
        return CausalAttention(model.empty_cache(9), start=0, pads=[0], **how)

    hook = LayerHook()
    hook.takes_blocks = True
    for attention in (RowsAttention([alone()]), alone(hooks=[hook]), alone(ends=model.last_attention)):
        with pytest.raises(AssertionError, match=f"{type(attention).__name__} takes no passes"):
            model.forward(ids_1C, attention, start=0, pads=[0])
    with throughout(torch.float64):
        one_token = model.forward(ids_1C[:, :1], RowsAttention([alone()]), start=0, pads=[0])
    assert largest_difference(one_token, by_hand("lckv", tuple(prompt(9)[:1]))[0]) < TOLERANCE


def test_two_ranks_are_refused(rank_pools: RankPools) -> None:
    with pytest.raises(Exception, match="in a chain of 2 stages .* are sent once; use one stage"):
        rank_pools.run(2, policy_tasks.generate, "lckv", [prompt(NUM_TOKENS)], (0, 21, 40), RankPolicies(), 3)
