"""A prefill with XAttention: transformers' logits with its mask, for every number of ranks and split in blocks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from runahead import ContextPartition, GenerationOptions, PrefillOptions
from runahead.attention.sparse.choice import ChoiceRule
from runahead.config import Attention, Carrier, DecodeName, PrefillName, Transfer
from runahead.features.layer_types import attending_to_all
from runahead.prefill.base import exact_layers
from tests.attention.xattention import BLOCK, chosen_by_all_products
from tests.conftest import RankPools
from tests.families import build, largest_difference, oracle_logits, prompt, throughout
from tests.ranks import tasks
from tests.ranks.test_exactness import TOLERANCE

PROMPT_TOKENS = 900
SPLITS = [(0, 900), (0, 512, 900), (0, 0, 900), (0, 128, 640, 900), (0, 384, 384, 900)]
HALF = ChoiceRule(density=0.5)
RULES = [HALF, ChoiceRule(threshold=0.6, stride=8)]


def options(rule: ChoiceRule, **others: Any) -> PrefillOptions:
    return PrefillOptions(
        attention=Attention.xattention, threshold=rule.threshold, density=rule.density, stride=rule.stride, **others
    )


@cache
def sparse_logits(
    family: str, ids: tuple[int, ...], rule: ChoiceRule, wrong: str = "", exact: tuple[int, ...] = ()
) -> Tensor:
    """Transformers' logits of the last token, with attention by a mask; the last layer's last query sees all.

    Args:
        exact: layers whose queries all do.
    """

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        num_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
        found = chosen_by_all_products(q[0], k[0], scaling, rule)
        if wrong == "no own block":
            found = found & ~torch.eye(found.shape[1]).bool()
            found[:, 0, 0] = True
        elif wrong == "by chunk":  # of the second chunk by its own keys
            found[:, 4:, 4:] = chosen_by_all_products(q[0, :, 512:], k[0, :, 512:], scaling, rule)
        elif wrong == "the future":
            found[:, :-1, :-1] = chosen_by_all_products(q[0].roll(-128, dims=1), k[0], scaling, rule)[:, :-1, :-1]
        if module.layer_idx in exact:
            found = torch.ones_like(found)
        at = torch.arange(num_tokens) // BLOCK
        sees = found[:, at[:, None], at].repeat_interleave(group, dim=0)
        if module.layer_idx == module.config.num_hidden_layers - 1:
            sees[:, -1] = True
        sees = sees & torch.ones(num_tokens, num_tokens).tril().bool()
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q @ k.mT * scaling).masked_fill(~sees, -math.inf)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("xattention_by_mask", attention)
    with throughout(torch.float64), torch.no_grad():
        module = build(family).double()
        module.config._attn_implementation = "xattention_by_mask"
        logits: Tensor = module(torch.tensor([ids])).logits[0, -1]
    return logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bounds", SPLITS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_the_mask(
    rank_pools: RankPools, family: str, bounds: tuple[int, ...], rule: ChoiceRule
) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = sparse_logits(family, tuple(ids), rule)
    assert largest_difference(oracle_logits(family, tuple(ids)).tolist(), expected) > 1e-4
    for transfer in Transfer:
        for row_tokens in (0, 128):
            given = options(rule, transfer=transfer, row_tokens=row_tokens)
            outcomes = rank_pools.run(len(bounds) - 1, tasks.prefill, family, [ids], bounds, given)
            (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
            assert largest_difference(logits[0], expected) < TOLERANCE, (transfer, row_tokens)


EXACT = [("llama", (1,)), ("llama_deep", (2, 3, 7)), ("qwen3_next", (1,)), ("falcon_h1", (0, 2))]


@pytest.mark.parametrize(("family", "exact"), EXACT)
def test_exact_layers_attend_to_all(rank_pools: RankPools, family: str, exact: tuple[int, ...]) -> None:
    """For every split; layers have the model's numbers. With the next layers in their place, or none, it is far off."""
    ids = prompt(500)
    expected = sparse_logits(family, tuple(ids), HALF, exact=exact)
    for bounds in ((0, 500), (0, 256, 500), (0, 128, 384, 500)):
        given = options(HALF, exact_layers=[*exact])
        outcomes = rank_pools.run(len(bounds) - 1, tasks.prefill, family, [ids], bounds, given)
        (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
        assert largest_difference(logits[0], expected) < TOLERANCE, bounds
    for others in ((), tuple(layer + 1 for layer in exact), tuple(layer - 1 for layer in exact)):
        wrong = sparse_logits(family, tuple(ids), HALF, exact=others)
        assert largest_difference(logits[0], wrong) > 1e-6, others


def test_all_layers_exact_are_the_exact_prefill_bit_by_bit(rank_pools: RankPools) -> None:
    texts, bounds = [prompt(500), prompt(333, seed=1)], (0, 256, 500)
    found = [
        [outcome.logits for outcome in rank_pools.run(2, tasks.prefill, "llama", texts, bounds, given)][1]
        for given in (PrefillOptions(), options(HALF, exact_layers=[0, 1, 2]), options(HALF))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("family", "exact", "those"),
    [("llama", [1, 3], "3, and .* are 0, 1, 2;"), ("qwen3_next", [0], "0, and"), ("gemma2", [0], "0, and .* are 1;")],
)
def test_layers_that_choose_nothing_are_no_exact_ones(family: str, exact: list[int], those: str) -> None:
    """Beyond the last one; with a state; with a window."""
    with pytest.raises(ValueError, match=rf"^prefill.exact_layers=.* names {those}"):
        exact_layers(tasks.tiny_model(family), options(HALF, exact_layers=exact))


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3n_text", "llama4_text", "qwen3_next", "falcon_h1", "lfm2"]
)
def test_configs_tell_the_layers_that_attend_to_all_as_their_masks_do(family: str) -> None:
    model = tasks.tiny_model(family)
    by_masks = [layer for number, layer in enumerate(model.kv_layers) if model.rules[number] is None]
    assert attending_to_all(model.config) == by_masks


@pytest.mark.parametrize("wrong", ["no own block", "by chunk", "the future"])
def test_wrong_choices_are_told(wrong: str) -> None:
    ids = tuple(prompt(PROMPT_TOKENS))
    right = sparse_logits("llama", ids, HALF)
    assert largest_difference(right.tolist(), sparse_logits("llama", ids, HALF, wrong)) > 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("carrier", [Carrier.copy, Carrier.backend])
def test_all_blocks_give_transformers_logits(rank_pools: RankPools, family: str, carrier: Carrier) -> None:
    """With windows, sinks, soft caps and states; those of layers with windows are exact in any case."""
    ids = prompt(300)
    expected = oracle_logits(family, tuple(ids))
    given = options(ChoiceRule(threshold=0.01 if family == "mistral" else 1.0), carrier=carrier)
    outcomes = rank_pools.run(2, tasks.prefill, family, [ids], (0, 128, 300), given)
    (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
    assert largest_difference(logits[0], expected) < TOLERANCE


def test_padded_rows_pieces_and_single_stages_choose_alike(rank_pools: RankPools) -> None:
    """A row whose padding is whole blocks is computed as if it were alone."""
    texts = [prompt(500), prompt(244, seed=1)]
    expected = [sparse_logits("llama", tuple(ids), HALF) for ids in texts[:1]]
    expected.append(sparse_logits("llama", tuple(texts[1]), ChoiceRule(threshold=1.0)))  # two blocks: both are chosen
    for bounds in ((0, 500), (0, 128, 500), (0, 384, 500)):
        outcomes = rank_pools.run(len(bounds) - 1, tasks.prefill, "llama", texts, bounds, options(HALF))
        (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
        for row, known in zip(logits, expected, strict=True):
            assert largest_difference(row, known) < TOLERANCE


def test_engines_split_into_blocks_and_report_what_was_chosen(rank_pools: RankPools) -> None:
    ids, asked = prompt(500), GenerationOptions(max_new_tokens=2, ignore_eos=True)
    for given, size, bounds in (
        (options(HALF), 2, (0, 205, 500)),
        (options(HALF, chunk_tokens=128, name=PrefillName.single), 1, None),
        (options(HALF), 3, None),
        (options(HALF, exact_layers=[1]), 2, (0, 205, 500)),
        (options(HALF, chunk_tokens=128, name=PrefillName.single, exact_layers=[1]), 1, None),
    ):
        decode = DecodeName.sharded if size == 3 else DecodeName.last
        for batch, _ in rank_pools.run(size, tasks.generate, "llama", [ids], asked, bounds, given, 0, None, decode):
            known = sparse_logits("llama", tuple(ids), HALF, exact=tuple(given.exact_layers)).topk(5)
            reported = batch.generations[0].first_token_logits_top5
            assert [token for token, _ in reported] == known.indices.tolist()
            assert largest_difference([logit for _, logit in reported], known.values) < TOLERANCE
            assert all(end % BLOCK == 0 for end in batch.boundaries[:-1])
            for rank in batch.ranks:
                assert rank.attention is not None and all(0.4 < each <= 1 for each in rank.attention.density if each)
                if given.exact_layers:
                    assert rank.attention.density[1] == 1 == rank.attention.covered[1]
            if rank.chunk_tokens > 2 * BLOCK:  # of the last rank; two blocks are both seen in any case
                assert rank.attention.density[0] < 1 and (rank.attention.density[1] == 1) == bool(given.exact_layers)


def test_partitions_are_rounded_to_blocks(rank_pools: RankPools) -> None:
    for bounds, rounded in (((0, 205, 500), (0, 256, 500)), ((0, 0, 499, 500), (0, 0, 384, 500)), ((0, 90), (0, 90))):
        assert ContextPartition(boundaries=bounds).in_blocks(BLOCK).boundaries == rounded
    with pytest.raises(Exception, match="is not in blocks of 128"):
        rank_pools.run(2, tasks.prefill, "llama", [prompt(500)], (0, 205, 500), options(HALF))
