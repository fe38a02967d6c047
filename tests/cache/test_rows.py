"""Rows of any store in one forward: each gets what it gets alone, under its own policies, whatever the others have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.h2o import H2O
from policies.infllm import InfLLM
from policies.snapkv import SnapKV
from runahead.attention.states import States
from runahead.cache.attention import CausalAttention
from runahead.cache.rows import RowsAttention
from runahead.config import CacheOptions, Positions
from runahead.conversation import Conversation
from runahead.decoding.forward import token_attention
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies import test_matrix, test_retrieval
from tests.ranks.tasks import tiny_model

LENGTHS = (40, 23, 7)
ANSWER = [token for token in range(5, 97) if not any(token in prompt(length, length) for length in LENGTHS)][:20]
"""More tokens than the 16 after which most policies cut back."""

Policies = Callable[[], RankPolicies]


def of(policy: Callable[[], Policy], **more: object) -> Policies:
    return lambda: RankPolicies.everywhere([policy()], **more)  # type: ignore[arg-type]


def named(name: str) -> Policies:
    if name in test_retrieval.NAMES:
        return of(lambda: test_retrieval.policy(name, test_retrieval.SOME[name]))
    return of(lambda: test_matrix.policy(name))


BITS = CacheOptions(bits=4, residual=4)
WAYS: dict[str, Policies] = {name: named(name) for name in [*test_matrix.KEEPING, "odd_tokens", *test_retrieval.NAMES]}
WAYS |= {
    "no policy": RankPolicies,
    "4 bits": lambda: RankPolicies(storage=BITS),
    "h2o, 4 bits": of(lambda: H2O(budget=16), storage=BITS),
    "adakv, 4 bits": of(lambda: test_matrix.policy("adakv"), storage=BITS),
    "quest, 4 bits": of(lambda: test_retrieval.policy("quest", {"fetch": 10}), storage=BITS),
    "snapkv, reencoded": of(lambda: SnapKV(budget=16, window=4, kernel=3), positions=Positions.reencoded),
    "infllm, clamped": of(
        lambda: InfLLM(fetch=10, sinks=2, block=2, representatives=1, observed=8, recent=8, min_tokens=0)
    ),
}
OFTEN = ("snapkv", "adakv", "h2o", "infinigen", "no policy")
FAMILIES = ("gpt2", "gpt_oss", "gemma2", "deepseek_v3")
RUNS = [
    *(("llama", way) for way in WAYS),
    *((family, way) for family in FAMILIES for way in OFTEN),
    *(("qwen3_next", way) for way in (*OFTEN, "4 bits", "quest", "snapkv, reencoded") if way != "infinigen"),
    *((family, way) for family in ("bloom", "gemma3n_text") for way in OFTEN if way != "infinigen"),
]


class Fed:
    """A prompt that was computed alone, and what is stored of it."""

    def __init__(self, model: Model, policies: RankPolicies, ids: list[int]) -> None:
        self.model, self.policies, self.length = model, policies, len(ids)
        self.conversation = Conversation(model, policies)
        self.conversation.feed(torch.tensor([ids]))

    def next(self) -> CausalAttention:
        """Attention of the next token."""
        cache, policies, start = self.conversation.cache, self.policies.between_turns, self.length
        assert cache is not None
        self.length += 1
        prompt_tokens = self.conversation.num_tokens
        return token_attention(self.model, cache, policies, start=start, pads=[0], prompt_tokens=prompt_tokens)


def alone(model: Model, policies: RankPolicies, ids: list[int]) -> Tensor:
    """Logits (C, V) after the tokens of the answer."""
    conversation = Conversation(model, policies)
    conversation.feed(torch.tensor([ids]))
    return conversation.follow(torch.tensor([ANSWER]), at_once=True)[0]


def together(model: Model, rows: list[Fed]) -> Tensor:
    """Logits (B, C, V) after these tokens in every row."""
    caches = [row.conversation.cache for row in rows]
    held = [cache.states for cache in caches if cache is not None and cache.states is not None]
    found, states = [], States.together(held) if held else None
    for token in ANSWER:
        attention = RowsAttention([row.next() for row in rows], states=states)
        ids_B1 = torch.full((len(rows), 1), token)
        found.append(model.forward(ids_B1, attention, start=attention.start, pads=attention.pads))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(("family", "way"), RUNS)
def test_rows_get_in_one_forward_what_each_gets_alone(family: str, way: str) -> None:
    """Seen to fail: positions, budgets or what is fetched of another row."""
    model, policies = tiny_model(family), WAYS[way]
    lengths = LENGTHS if model.uneven_limit is None else (LENGTHS[0],) * 3
    prompts = [prompt(length, seed=length + number) for number, length in enumerate(lengths)]
    with throughout(model.dtype), torch.inference_mode():
        expected = torch.stack([alone(model, policies(), ids) for ids in prompts])
        found = together(model, [Fed(model, policies(), ids) for ids in prompts])
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)  # float64


def test_each_row_has_policies_of_its_own() -> None:
    """Full, equal and unequal heads, few bits, predicted and asked queries side by side."""
    model = tiny_model("llama")
    ways = ["no policy", "snapkv", "h2o, 4 bits", "adakv", "infinigen", "quest", "4 bits"]
    prompts = [prompt(40 - 3 * number, seed=number) for number in range(len(ways))]
    with throughout(model.dtype), torch.inference_mode():
        expected = [alone(model, WAYS[way](), ids) for way, ids in zip(ways, prompts, strict=True)]
        found = together(model, [Fed(model, WAYS[way](), ids) for way, ids in zip(ways, prompts, strict=True)])
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-9, rtol=0)
