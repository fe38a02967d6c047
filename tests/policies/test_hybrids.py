"""Policies and few bits on hybrid models: attention reads what they keep, and states are of all tokens.

The reference is transformers in one process, whose attention leaves out what the policy has dropped.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens, H head dim, n slots.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from policies.experiments.minicache import MiniCache
from policies.kvzip import KVzip
from runahead import Conversation
from runahead.attention.states import States
from runahead.config import CacheOptions
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, largest_difference, prompt, throughout
from tests.policies import test_retrieval
from tests.policies.test_matrix import policy
from tests.ranks.tasks import tiny_model

FAMILIES = ["qwen3_next", "falcon_h1", "lfm2"]
LENGTH, MORE = 40, prompt(12, seed=3)
TOLERANCE = 1e-9

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(number of the layer with attention, keys (K, S, H), values (K, S, H)) -> keys, values, and which of them (K, S) the
tokens after the prompt see."""


def oracle(family: str, ids: list[int], change: Change) -> Tensor:
    """Logits (C, V) of the tokens after the first `LENGTH` ones by transformers, in whose attention these see less."""
    module, calls = build(family, attention="eager"), list[int]()

    def attention(layer: Any, q_1NSH: Tensor, k_1KSH: Tensor, v_1KSH: Tensor, mask: Any, **more: Any) -> Any:
        number = len(calls)
        calls.append(number)
        group, size = q_1NSH.shape[1] // k_1KSH.shape[1], q_1NSH.shape[2]
        later_SS = torch.ones(size, size, dtype=torch.bool).triu(1)
        outs = []
        changed = change(number, k_1KSH[0], v_1KSH[0])
        for head, q_SH in enumerate(q_1NSH[0]):
            k_SH, v_SH, seen_S = (each[head // group] for each in changed)
            hidden_SS = later_SS.clone()
            hidden_SS[LENGTH:] |= ~seen_S
            rows = [(q_SH[:LENGTH], k_1KSH[0, head // group], v_1KSH[0, head // group], hidden_SS[:LENGTH])]
            rows.append((q_SH[LENGTH:], k_SH, v_SH, hidden_SS[LENGTH:]))
            parts = [
                (q @ k.T * more["scaling"]).masked_fill(hidden, -torch.inf).softmax(-1) @ v for q, k, v, hidden in rows
            ]
            outs.append(torch.cat(parts))
        return torch.stack(outs, dim=1)[None], None

    ALL_ATTENTION_FUNCTIONS.register("of_what_is_kept", attention)
    module.set_attn_implementation("of_what_is_kept")
    with torch.inference_mode(), throughout(module.dtype):
        return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, LENGTH:]


def followed(family: str, policies: RankPolicies) -> tuple[Conversation, Tensor]:
    """A conversation after a prompt, and the logits (C, V) of what follows in another turn."""
    model = tiny_model(family)
    with throughout(model.dtype):
        conversation = Conversation(model, policies)
        conversation.feed(torch.tensor([prompt(LENGTH)]))
        kept = conversation.fork()
        return kept, conversation.feed(torch.tensor([MORE]), all_logits=True, cut_back=False)[0]


def kept_tokens(conversation: Conversation, layer: int, num_tokens: int) -> Tensor:
    """Mask of the tokens (K, S) that each head of a layer has kept, or that came later."""
    assert conversation.cache is not None
    stored: Any = conversation.cache.layers[layer]
    seen_KS = torch.zeros(stored.shape.num_kv_heads, num_tokens, dtype=torch.bool)
    seen_KS[:, LENGTH:] = True
    [positions_Kn] = stored.positions_BKn().expand(1, len(seen_KS), -1)
    for head, positions_n in enumerate(positions_Kn):
        seen_KS[head, positions_n[positions_n >= 0].long()] = True
    return seen_KS


def by_kept(conversation: Conversation) -> Change:
    return lambda layer, k_KSH, v_KSH: (k_KSH, v_KSH, kept_tokens(conversation, layer, k_KSH.shape[1]))


@pytest.mark.parametrize("name", ["streaming_llm", "snapkv", "h2o", "adakv", "zigzagkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_turn_attends_to_what_was_kept_and_has_the_states_of_all(family: str, name: str) -> None:
    kept, ours = followed(family, RankPolicies.everywhere([policy(name)]))
    expected = oracle(family, [*prompt(LENGTH), *MORE], by_kept(kept))
    assert largest_difference(ours, expected) < TOLERANCE
    whole = oracle(family, [*prompt(LENGTH), *MORE], lambda _, k, v: (k, v, torch.ones(k.shape[:2], dtype=torch.bool)))
    assert largest_difference(ours, whole) > 1e-4, "something was dropped"


def test_states_of_what_was_kept_alone_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong variant: the states are forgotten with the tokens that are dropped."""
    kept, ours = followed("qwen3_next", RankPolicies.everywhere([policy("snapkv")]))
    monkeypatch.setattr(States, "fork", lambda self: States([layer.made(torch.zeros_like) for layer in self.layers]))
    with throughout(torch.float64):
        wrong = kept.fork().feed(torch.tensor([MORE]), all_logits=True, cut_back=False)[0]
    assert largest_difference(ours, wrong) > 1e-4


@pytest.mark.parametrize("name", ["exact_topk", "quest"])
def test_a_policy_that_retrieves_all_gives_the_logits_of_all(name: str) -> None:
    for options, is_all in ((test_retrieval.ALL, True), (test_retrieval.SOME, False)):
        retrieving = test_retrieval.policy(name, options[name])
        kept, _ = followed("qwen3_next", RankPolicies.everywhere([retrieving]))
        with throughout(torch.float64):
            ours = kept.follow(torch.tensor([MORE]))[0]  # as if they were generated, since a turn sees all
        whole = oracle("qwen3_next", [*prompt(LENGTH), *MORE], lambda _, k, v: (k, v, torch.ones(k.shape[:2]).bool()))
        assert (largest_difference(ours, whole) < TOLERANCE) == is_all


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_few_bits_are_of_keys_and_values_alone(family: str, bits: int) -> None:
    """The reference attends to the codes as they are read back, and has exact states."""
    policies = RankPolicies(storage=CacheOptions(bits=bits, residual=8, residual_bits=None))
    kept, ours = followed(family, policies)
    assert kept.cache is not None
    layers: list[Any] = list(kept.cache.layers)

    def in_few_bits(number: int, k_KSH: Tensor, v_KSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_KSH, v_KSH = k_KSH.clone(), v_KSH.clone()
        [k_stored], [v_stored] = layers[number].slab().read(0, LENGTH)
        assert 0 < largest_difference(k_stored, k_KSH[:, :LENGTH]) < {8: 0.1, 4: 2.0}[bits]
        k_KSH[:, :LENGTH], v_KSH[:, :LENGTH] = k_stored, v_stored
        return k_KSH, v_KSH, torch.ones(k_KSH.shape[:2], dtype=torch.bool)

    assert largest_difference(ours, oracle(family, [*prompt(LENGTH), *MORE], in_few_bits)) < TOLERANCE


def test_layers_are_merged_only_where_they_are_neighbours() -> None:
    for family, has_neighbours in (("falcon_h1", True), ("qwen3_next", False), ("nemotron_h", False)):
        policies = RankPolicies.everywhere([MiniCache(start_share=0.0, retain_share=1.0)])
        if has_neighbours:
            _, ours = followed(family, policies)
            whole = oracle(family, [*prompt(LENGTH), *MORE], lambda _, k, v: (k, v, torch.ones(k.shape[:2]).bool()))
            assert largest_difference(ours, whole) < TOLERANCE
        else:
            with pytest.raises(ValueError, match="minicache merges neighbouring layers .* none among its layers with"):
                Conversation(tiny_model(family), policies)


def test_a_policy_that_repeats_the_prompt_is_refused_by_that_reason() -> None:
    with pytest.raises(ValueError, match="policy kvzip scores tokens by how the model repeats the prompt, and linear"):
        Conversation(tiny_model("qwen3_next"), RankPolicies.everywhere([KVzip(budget=16)]))
