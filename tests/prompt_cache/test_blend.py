"""Prompts whose modules are computed again in part, against a forward of all tokens that is told what to take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.clusterkv import ClusterKV
from policies.prompt_cache import PromptCache, Schema
from policies.retroinfer import RetroInfer
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from policies.squeezed_attention import SqueezedAttention
from runahead import Engine, GenerationOptions, Model
from runahead.attention import op
from runahead.attention.partial import AttentionTerms
from runahead.cache.kv_cache import KVCache
from runahead.config import CacheOptions
from runahead.model.layers import narrowing
from runahead.prefill.stage_run import StageRun
from runahead.reuse.blend import FIRST_LAYERS, shares_by_layer
from runahead.reuse.reuse import encode_segment
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import MIXED_LAYERS, build, largest_difference, throughout
from tests.prompt_cache.serving import (
    MaskedAttention,
    byte_model,
    one_rank,
    plain,
    random_ids,
    serve,
    serve_on_ranks,
)
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level

EXACT = 1e-9
"""float64: what is left is rounding."""


@cache
def deep_model(family: str = "llama") -> Model:
    """A model with layers enough to choose in several of them."""
    more = {"layer_types": [*MIXED_LAYERS, *MIXED_LAYERS[:2]]} if family == "gpt_oss" else {}
    with throughout(torch.float64):
        return Model(build(family, num_hidden_layers=5, **more))


def blended_prompt(seed: int, share: float, sizes: Sequence[int] = (7, 12, 15)) -> ReusingPrompt:
    """Modules one after another with a gap after each, the first as it is, the others blended, and new text."""
    draw, start = random.Random(seed), 0
    uses, new = list[SegmentUse](), dict[int, int]()
    for size in sizes:
        segment = Segment(name=f"{start}", ids=random_ids(size, draw), positions=tuple(range(start, start + size)))
        uses.append(SegmentUse(segment=segment, parts=(range(size),)))
        if start:
            new.update(zip(segment.positions, segment.ids, strict=True))
        start += size + 2
        new[start - 2] = random_ids(1, draw)[0]
    new.update(zip(range(start, start + 4), random_ids(4, draw), strict=True))
    return ReusingPrompt(
        uses=tuple(uses[:1]),
        new_ids=tuple(new[each] for each in sorted(new)),
        new_positions=tuple(sorted(new)),
        blended=tuple(uses[1:]),
        share=share,
    )


def independent(prompt: ReusingPrompt) -> ReusingPrompt:
    """The same without anything computed again."""
    again = {position for use in prompt.blended for position, _ in use.tokens}
    new = [each for each in zip(prompt.new_positions, prompt.new_ids, strict=True) if each[0] not in again]
    return ReusingPrompt(
        uses=prompt.all_uses, new_ids=tuple(token for _, token in new), new_positions=tuple(at for at, _ in new)
    )


class WrittenOut(MaskedAttention):
    """All tokens of a prompt in every layer, with stored keys and values in place of those that are not computed.

    The choice is made here once more: of those left in each chunk, the tokens with the largest deviations.

    Args:
        lengths: new tokens of each stage.
    """

    def __init__(self, model: Model, prompt: ReusingPrompt, lengths: Sequence[int]) -> None:
        new = dict(zip(prompt.new_positions, prompt.new_ids, strict=True))
        every = new | dict(token for use in prompt.all_uses for token in use.tokens)
        self.ids = [every[position] for position in sorted(every)]
        at_S = torch.tensor(sorted(every))
        super().__init__(at_S, at_S[None, :] <= at_S[:, None])
        self._stored, self._shares = (
            list[tuple[Tensor, list[Tensor]]](),
            shares_by_layer(prompt.share, model.num_layers),
        )
        self._fixed, left = list[tuple[Tensor, list[Tensor]]](), list[Tensor]()
        for use in prompt.all_uses:
            index_T = torch.searchsorted(at_S, torch.tensor([position for position, _ in use.tokens]))
            layers = encode_segment(model, use.segment)
            if use in prompt.blended:
                self._stored.append((index_T, layers))
                left.append(index_T)
            else:
                self._fixed.append((index_T, layers))
        self.left = set(torch.cat(left).tolist())
        new_at = torch.searchsorted(at_S, torch.tensor(prompt.new_positions)).tolist()
        chunks = [new_at[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
        self._chunks = [self.left.intersection(chunk) for chunk in chunks]

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        kv_SKX = torch.cat([k_BKCH, v_BKCV], dim=-1)[0].transpose(0, 1).clone()
        apart: dict[int, tuple[float, float]] = {}
        dim = k_BKCH.shape[-1]
        for index_T, layers in self._stored:
            for index, stored_KX in zip(index_T.tolist(), layers[layer], strict=True):
                delta = (kv_SKX[index] - stored_KX).square()
                if index in self.left:
                    apart[index] = float(delta[:, :dim].sum()), float(delta[:, dim:].sum())
                else:
                    kv_SKX[index] = stored_KX
        for index_T, layers in self._fixed:
            kv_SKX[index_T] = layers[layer]
        out = super().attend(
            layer, q_BNCH, kv_SKX[..., :dim].transpose(0, 1)[None], kv_SKX[..., dim:].transpose(0, 1)[None], terms
        )
        if FIRST_LAYERS <= layer + 1 < len(self._shares):
            left, self.left = self.left, set()
            for chunk in self._chunks:
                sums = [sum(apart[index][kind] for index in chunk & left) or 1.0 for kind in (0, 1)]
                size = {index: apart[index][0] / sums[0] + apart[index][1] / sums[1] for index in chunk & left}
                count = math.ceil(self._shares[layer + 1] * len(chunk) - EXACT)
                self.left.update(sorted(size, key=lambda index: -size[index])[:count])
        return out


def written_out(model: Model, prompt: ReusingPrompt, lengths: Sequence[int] = ()) -> Tensor:
    """Logits (V) after the last token."""
    with throughout(torch.float64):
        attention = WrittenOut(model, prompt, lengths or [len(prompt.new_ids)])
        return model.forward(torch.tensor([attention.ids]), attention, start=0, pads=[0])[0]


def logits(model: Model, *prompts: ReusingPrompt) -> Tensor:
    served = serve(model, prompts)
    assert served is not None
    return served.logits[0]


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral", "gpt_oss"])
def test_a_blend_equals_a_forward_of_all_tokens_with_stored_ones_in_place(family: str) -> None:
    model = deep_model(family)
    for share in (0.1, 0.5, 0.9):
        asked = blended_prompt(3, share)
        served = serve(model, [asked], following=(5, 7))
        assert served is not None
        assert largest_difference(served.logits[0][0], written_out(model, asked)) < EXACT
    more = replace(
        asked, new_ids=(*asked.new_ids, 5, 7), new_positions=(*asked.new_positions, asked.end, asked.end + 1)
    )
    assert largest_difference(served.logits[-1][0], written_out(model, more, [len(more.new_ids)])) < EXACT


def as_published(*args: Any) -> tuple[Tensor, Tensor]:
    """The authors' mask: the computed tokens count as the last ones, so they see later tokens."""
    *others, queries_C, keys_S = args
    return attend_at(*others, torch.arange(len(queries_C)) + 1 + keys_S.max() - len(queries_C), keys_S)


def sees_computed_alone(*args: Any) -> tuple[Tensor, Tensor]:
    """Without the keys of tokens that the layer does not compute, as if modules stayed apart."""
    q, k, v, terms, queries_C, keys_S = args
    is_computed_S = torch.isin(keys_S, queries_C)
    if is_computed_S.any():  # the chunk's own
        k, v, keys_S = k[:, :, is_computed_S], v[:, :, is_computed_S], keys_S[is_computed_S]
    return attend_at(q, k, v, terms, queries_C, keys_S)


def at_first_positions(value: Any, num_new: int, left_Bc: Tensor) -> Any:
    """Rotations of the first tokens in place of those of the tokens that are left."""
    return CUT(value, num_new, torch.arange(left_Bc.shape[1])[None])


attend_at, CUT = op.attend_at, narrowing._cut
WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "computed tokens are the last": (op, "attend_at", as_published),
    "modules stay apart": (op, "attend_at", sees_computed_alone),
    "positions are not kept": (narrowing, "_cut", at_first_positions),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_masks_and_positions_are_told_from_the_right_ones(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = blended_prompt(3, 0.5)
    monkeypatch.setattr(*WRONG[wrong])
    assert largest_difference(logits(deep_model(), asked)[0], written_out(deep_model(), asked)) > 1e-3


@pytest.mark.parametrize("published", [False, True], ids=["ours", "as published"])
def test_no_token_sees_later_ones(published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another token after all modules changes no keys and values before it; with the published mask it does."""
    stored = list[KVCache]()

    def noted(self: StageRun, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        stored.append(self.cache)

    made = StageRun.__init__
    monkeypatch.setattr(StageRun, "__init__", noted)
    if published:
        monkeypatch.setattr(*WRONG["computed tokens are the last"])
    asked = blended_prompt(3, 0.9)
    for last in (5, 7):
        logits(deep_model(), replace(asked, new_ids=(*asked.new_ids[:-5], last, *asked.new_ids[-4:])))
    before = len(asked.new_ids) - 5
    same = [torch.equal(*(each.layer(layer).tokens(0, before) for each in stored)) for layer in range(5)]
    assert all(same) is not published


SCHEMA = """<schema name="s">the letters <module name="a">of the captain to <param name="p" len="3"/> </module><module
name="b">his sister </module><module name="c">from the ice</module></schema>"""
PROMPT = '<prompt schema="s"><a p="you"/><c/>hello</prompt>'


def reusing(**options: Any) -> ReusingPrompt:
    made = PromptCache(Schema.from_xml(SCHEMA), byte_level(), **({"link_tokens": 0} | options))
    return made.prompt(PROMPT)


def test_all_computed_again_is_no_cache_and_none_is_independent_modules() -> None:
    model, every, none = byte_model(), reusing(recompute=1.0), reusing(recompute=0.0)
    at = sorted({position for use in every.all_uses for position, _ in use.tokens} | {*every.new_positions})
    plain_logits = logits(model, replace(plain(every.ids), new_positions=tuple(at)))
    assert every.blended and largest_difference(logits(model, every), plain_logits) < EXACT
    assert torch.equal(logits(model, none), logits(model, independent(every)))
    some = logits(model, reusing(recompute=0.3))
    assert largest_difference(some, plain_logits) > 1e-3 < largest_difference(some, logits(model, none))


def test_link_tokens_and_the_beginning_of_the_prompt_are_not_chosen_from() -> None:
    linked = reusing(recompute=0.3, link_tokens=2)
    blended = {position for use in linked.blended for position, _ in use.tokens}
    apart = reusing(link_tokens=2)
    assert {*linked.new_positions} == {*apart.new_positions} | blended and not blended & {*apart.new_positions}
    [beginning] = linked.uses
    assert beginning.tokens[0][0] == 0 and linked.num_cached == apart.num_cached and linked.ids == apart.ids


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    """Also where one has fewer tokens to compute than others, and then computes some in vain."""
    prompts = [blended_prompt(3, 0.2), blended_prompt(4, 0.9, (5, 20)), plain(random_ids(45, random.Random(1)))]
    together = logits(deep_model(), *prompts)
    for row, each in enumerate(prompts):
        assert largest_difference(together[row], logits(deep_model(), each)[0]) < EXACT


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.sampled(2)
def test_each_rank_chooses_in_its_chunk(rank_pools: RankPools, share: float) -> None:
    asked, lengths = blended_prompt(3, share), [16, 18]
    assert len(asked.new_ids) == sum(lengths)
    _, (served, _) = rank_pools.run(2, serve_on_ranks, "llama", [asked], lengths, None)
    expected = written_out(tiny_model("llama"), asked, lengths)
    assert served is not None and largest_difference(served[0][0], expected) < EXACT


@pytest.mark.parametrize("num_layers", [1, 2, 3, 30])
def test_shares_fall_around_their_mean(num_layers: int) -> None:
    for share in (0.01, 0.15, 0.8, 1.0):
        shares = shares_by_layer(share, num_layers)
        later = shares[FIRST_LAYERS:]
        assert len(shares) == num_layers and set(shares[:FIRST_LAYERS]) == {1.0}
        assert sorted(shares, reverse=True) == shares and all(0 < each <= 1 for each in later)
        assert not later or sum(later) / len(later) == pytest.approx(share)


def test_the_report_counts_what_is_computed_again() -> None:
    asked = blended_prompt(3, 0.5)
    [rank] = Engine(deep_model(), one_rank()).generate([asked], GenerationOptions(max_new_tokens=1)).ranks
    assert rank.reuse is not None and rank.reuse.cached_tokens == 34
    # 27 tokens of two modules: all in two layers, then shares of 0.75, 0.5 and 0.25.
    assert rank.reuse.recomputed_tokens == (27 + 27 + 21 + 14 + 7) / 5


def storing(bits: int, residual: int) -> RankPolicies:
    return RankPolicies(storage=CacheOptions(bits=bits, residual=residual, residual_bits=None))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["clusterkv", "squeezed_attention", "retroinfer", "a window of all tokens"])
def test_a_blend_of_which_all_is_kept_and_retrieved_is_the_blend(name: str, share: float) -> None:
    """In the prompt against a forward of all tokens under a mask, and after it against a blend without policies."""
    model, asked, following = deep_model(), blended_prompt(3, share), (5, 7, 11)
    few: dict[str, Any] = {"first_layer": 0, "min_tokens": 0, "cluster": 5, "iterations": 4, "fetch": 1000}
    retrieving = {"clusterkv": ClusterKV, "squeezed_attention": SqueezedAttention, "retroinfer": RetroInfer}
    if name in retrieving:
        policies = RankPolicies.everywhere([retrieving[name](**few)])
    else:
        policies = storing(4, residual=1000)
    ours, theirs = (serve(model, [asked], following=following, policies=each) for each in (policies, None))
    assert ours is not None and theirs is not None
    assert largest_difference(ours.logits[0][0], written_out(model, asked)) < EXACT
    assert all(largest_difference(*each) < EXACT for each in zip(ours.logits, theirs.logits, strict=True))


@pytest.mark.parametrize("bits", [4, 2])
def test_a_blend_of_all_tokens_in_few_bits_is_their_prompt_in_few_bits(bits: int) -> None:
    model, policies = deep_model(), storing(bits, residual=8)
    every = blended_prompt(3, 1.0, (30, 40, 35))
    alone = replace(every, blended=(), share=0.0)  # all of them are new tokens
    ours, theirs = (serve(model, [each], following=(5, 7), policies=policies) for each in (every, alone))
    exact = serve(model, [every], following=(5, 7))
    assert ours is not None and theirs is not None and exact is not None
    assert all(largest_difference(*each) < EXACT for each in zip(ours.logits, theirs.logits, strict=True))
    assert largest_difference(ours.logits[-1], exact.logits[-1]) > 1e-6


def test_rows_of_a_blend_in_few_bits_are_as_each_would_be_alone() -> None:
    prompts = [
        blended_prompt(3, 0.2, (30, 40)),
        blended_prompt(4, 0.9, (5, 60)),
        plain(random_ids(85, random.Random(1))),
    ]
    policies = storing(4, residual=8)
    together = serve(deep_model(), prompts, following=(5, 7), policies=policies)
    assert together is not None
    for row, each in enumerate(prompts):
        alone = serve(deep_model(), [each], following=(5, 7), policies=policies)
        assert alone is not None
        assert all(largest_difference(a[row], b[0]) < EXACT for a, b in zip(together.logits, alone.logits, strict=True))
