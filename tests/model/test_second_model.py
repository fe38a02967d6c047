"""A second `Model` over the same modules, as of a notebook cell that is run again, computes what the first does."""

from __future__ import annotations

import pytest

from policies import InfiniGen, PyramidInfer
from runahead import Engine, GenerationOptions, Model, RankPolicies, Ranks, RanksOptions
from runahead.config import Device
from tests.families import build, prompt, throughout

OPTIONS = GenerationOptions(max_new_tokens=6, ignore_eos=True)
POLICIES = {
    "full": lambda: None,
    "narrowing": lambda: RankPolicies.everywhere([PyramidInfer()]),
    "looking ahead": lambda: RankPolicies.everywhere([InfiniGen(ahead=True)]),
}


def answer(model: Model, how: str) -> tuple[list[int], list[float]]:
    """New tokens, and the largest logits of the first of them."""
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    [generation] = Engine(model, ranks, policies=POLICIES[how]()).generate([prompt(40)], OPTIONS).generations
    return generation.new_token_ids, [logit for _, logit in generation.first_token_logits_top5]


@pytest.mark.parametrize(
    ("family", "how"),
    [("llama_dms", "full"), ("gemma4_text", "full"), ("llama", "narrowing"), ("llama", "looking ahead")],
)
def test_a_second_model_over_the_same_modules_computes_the_same(family: str, how: str) -> None:
    module = build(family)
    num_hooks = []
    with throughout(module.dtype):
        first = Model(module)
        expected = answer(first, how)
        for model in (Model(module), first):
            assert answer(model, how) == expected
            num_hooks.append(sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules()))
    assert num_hooks[0] == num_hooks[1]
