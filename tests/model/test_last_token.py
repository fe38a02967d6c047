"""The last layer after its keys and values, which computes the last token alone where nobody needs others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from policies.snapkv import SnapKV
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
from runahead.model.seam import SeamCache
from tests.families import FAMILIES, HYBRIDS, SHARING, build, largest_difference, oracle_logits, prompt, throughout
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 70
TOLERANCE = 1e-9  # float64, as in test_exactness
STATE_IN_LAST = {"falcon_h1", "zamba2", "mamba", "mamba2", "zaya"}
"""Families whose last layer holds a state, which needs all tokens."""

some_families = pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma4_text", "qwen3_next"])


def logits(model: Model, attention: CausalAttention | None = None, **how: Any) -> Tensor:
    attention = attention or CausalAttention(model.empty_cache(NUM_TOKENS), start=0, pads=[0])
    with throughout(torch.float64):
        return model.forward(torch.tensor([prompt(NUM_TOKENS)]), attention, start=0, pads=[0], **how)[0]


@pytest.mark.parametrize("family", [*FAMILIES, *SHARING, *HYBRIDS])
@pytest.mark.sampled(12)
def test_logits_are_those_of_the_whole_layer_and_of_transformers(family: str) -> None:
    model = tiny_model(family)
    assert (model.last_layer is None) == (family in STATE_IN_LAST)
    expected = oracle_logits(family, tuple(prompt(NUM_TOKENS)))
    assert largest_difference(logits(model), expected) < TOLERANCE
    if model.computes_blocks:
        assert largest_difference(logits(model, row_tokens=23), expected) < TOLERANCE


def test_a_layer_that_counts_positions_counts_the_tokens_before_the_last_one() -> None:
    """Llama 4's last layer scales queries by their positions; at once, and in blocks of rows."""
    family = "llama4_text_tempered"
    model, expected = tiny_model(family), oracle_logits(family, tuple(prompt(NUM_TOKENS)))
    assert model.last_layer is not None and model.computes_blocks
    for how in ({}, {"row_tokens": 23}):
        assert largest_difference(logits(model, **how), expected) < TOLERANCE


@some_families
def test_keys_and_values_are_bit_by_bit_those_of_the_whole_layer(family: str) -> None:
    model, caches = tiny_model(family), []
    for how in ({}, {"logits_of": [0, NUM_TOKENS - 1]}):
        caches.append(model.empty_cache(NUM_TOKENS))
        logits(model, CausalAttention(caches[-1], start=0, pads=[0]), **how)
    for layer in range(model.num_layers):
        assert torch.equal(*(cache.tokens(layer, 0, NUM_TOKENS) for cache in caches))


def test_what_is_saved_is_all_of_the_layer_but_its_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: 2 FLOPs for each weight of the output projection and the MLP, and 4 N H for each pair that attends."""
    model = tiny_model("llama")
    assert model.last_layer is not None
    counts = []
    for last in (model.last_layer, None):
        monkeypatch.setattr(model, "last_layer", last)
        with FlopCounterMode(display=False) as counter:
            logits(model)
        counts.append(counter.get_total_flops())
    layer = model.module.model.layers[-1]
    weights = sum(each.numel() for name, each in layer.named_parameters() if name.split(".")[-2] in BEHIND)
    projections = sum(each.numel() for name, each in layer.named_parameters() if name.split(".")[-2] in BEFORE)
    saved = counts[1] - counts[0]
    assert saved >= 2 * weights * (NUM_TOKENS - 1) - 2 * projections
    assert len(BEHIND) == 4 and weights > projections


BEFORE = {"q_proj", "k_proj", "v_proj"}
BEHIND = {"o_proj", "gate_proj", "up_proj", "down_proj"}


class Noting(LayerHook):
    """Notes the hooks of the last layer, with the number of queries and of tokens that they see."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []

    def _note(self, name: str, call: LayerCall) -> None:
        if call.layer == 2:
            self.found.append((name, call.q_BNCH.shape[2], call.k_BKCH.shape[2]))

    def before_save(self, call: LayerCall) -> None:
        self._note("before_save", call)

    def wait_for_load(self, call: LayerCall) -> None:
        self._note("wait_for_load", call)

    def attended(self, call: LayerCall) -> None:
        self._note("attended", call)
        assert call.layer != 2 or call.seen.lse().shape[2] == NUM_TOKENS


def test_hooks_see_all_tokens_once() -> None:
    """Also the log-sum-exp of queries whose output nobody needs."""
    model, noting = tiny_model("llama"), Noting()
    assert model.last_layer is not None
    logits(model, CausalAttention(model.empty_cache(NUM_TOKENS), start=0, pads=[0], hooks=[noting]))
    names = ["before_save", "wait_for_load", "attended"]
    assert noting.found == [(name, NUM_TOKENS, NUM_TOKENS) for name in names]


def test_policies_keep_what_they_keep_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """SnapKV looks at the queries of its window, of which the last layer computes one to the end."""
    model, kept = tiny_model("llama"), []
    assert model.last_layer is not None
    for last in (model.last_layer, None):
        monkeypatch.setattr(model, "last_layer", last)
        run = Run(model, [SnapKV(budget=16, window=8, kernel=3)], [prompt(40), prompt(23, seed=1)])
        run.prefill()
        kept.append([layer.positions_BKn() for layer in run.kept.layers])
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


class Wrong(CausalAttention):
    """Attention that lets the last token see all tokens but one."""

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if self._stored is not None:
            self._stored.tokens.start -= 1
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


def test_a_token_too_few_would_be_seen() -> None:
    model = tiny_model("llama")
    wrong = logits(model, Wrong(model.empty_cache(NUM_TOKENS), start=0, pads=[0]))
    assert largest_difference(wrong, oracle_logits("llama", tuple(prompt(NUM_TOKENS)))) > TOLERANCE


def test_a_model_that_is_wrong_for_the_last_token_alone_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    last_alone = SeamCache.last_alone

    def negated(forward: SeamCache, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        given, named = last_alone(forward, args, keywords)
        return (
            ((-given[0], *given[1:]), named) if given else (given, named | {"hidden_states": -named["hidden_states"]})
        )

    monkeypatch.setattr(SeamCache, "last_alone", negated)
    with (
        throughout(torch.float64),
        pytest.warns(UserWarning, match="computes all tokens of a prompt in its last layer"),
    ):
        model = Model(build("llama"))
    assert model.last_layer is None
    model._look_at_layers()  # as for its shares
    assert model.last_layer is None
    assert largest_difference(logits(model), oracle_logits("llama", tuple(prompt(NUM_TOKENS)))) < TOLERANCE
