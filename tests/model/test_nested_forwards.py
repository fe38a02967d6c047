"""A forward between two layers of another one, as in a server, gives what it gives alone, and so does the other one."""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from policies.pyramidinfer import PyramidInfer
from runahead import Conversation, Model
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout

NARROWING = RankPolicies.everywhere([PyramidInfer(mean_keep=0.5, min_tokens=4, recent_ratio=0.1, voters=None)])


@cache
def model(family: str) -> Model:
    with throughout(torch.float64):
        return Model(build(family), name=family)


def chunk(family: str, seed: int, policies: RankPolicies | None = None) -> Tensor:
    """Logits (B, V) behind a prompt."""
    return Conversation(model(family), policies).feed(torch.tensor([prompt(40, seed)]))


def all_tokens(family: str, seed: int) -> Tensor:
    """Logits (B, C, V) of all tokens, as of those that were drafted."""
    return Conversation(model(family)).feed(torch.tensor([prompt(40, seed)]), all_logits=True)


def two_tokens(family: str, seed: int) -> Tensor:
    """Logits (B, V) behind a prompt's first token and its next one."""
    conversation = Conversation(model(family))
    conversation.feed(torch.tensor([prompt(1, seed)]))
    return conversation.feed(torch.tensor([prompt(1, seed + 1)]))


KINDS: dict[str, Callable[[str, int], Tensor]] = {
    "a chunk": chunk,
    "all tokens": all_tokens,
    "single tokens": two_tokens,
    "a narrowed chunk": partial(chunk, policies=NARROWING),
}


def nested(layers: Iterable[torch.nn.Module], outer: Callable[[], Tensor], inner: Callable[[], Tensor]) -> list[Tensor]:
    """Results of `outer`, and of `inner` after each layer of the first forward in it."""
    found, is_inside = list[Tensor](), [False]

    def run_inner(*_: object) -> None:
        if not is_inside[0]:
            is_inside[0] = True
            found.append(inner())
            is_inside[0] = False

    hooks = [layer.register_forward_hook(run_inner) for layer in layers]
    try:
        return [outer(), *found]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("family", ["llama", "llama_dynamic_ntk", "gemma3n_text", "gpt2", "qwen3_dms"])
def test_nested_forwards_do_not_meet(family: str, outer: str, inner: str) -> None:
    if "narrowed" in outer + inner and family != "llama":
        pytest.skip("policies that narrow are for models with rotations and keys of their own")
    outside, inside = partial(KINDS[outer], family, 0), partial(KINDS[inner], family, 7)
    with throughout(torch.float64):
        alone, alone_inside = outside(), inside()
        found, *found_inside = nested(model(family)._layers, outside, inside)
    assert torch.equal(found, alone)
    assert found_inside and all(torch.equal(each, alone_inside) for each in found_inside)
