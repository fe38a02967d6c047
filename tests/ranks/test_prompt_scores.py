"""Log-probabilities of a prompt's tokens, each from the rank that has the token before it, are transformers' own."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor

from runahead import Ranks
from runahead.config import Device, PrefillName, PrefillOptions, RanksOptions, Transfer
from runahead.model.head import Head
from runahead.prefill import scoring
from runahead.report import PromptLogprobs
from tests.conftest import RankPools
from tests.families import FAMILIES, HYBRIDS, SHARING, build, prompt, throughout
from tests.ranks import tasks

TEXTS = [prompt(61), prompt(23, seed=1)]
NUMBER = 3
TOLERANCE = 1e-9
"""As of the logits in test_exactness.py: what is wrong by a place or a key costs more than 1e-4."""

COMMON = ["llama", "gemma2", "mistral", "cohere", "opt", "gemma3n_text", "gemma4_text", "qwen3_next"]
"""Plain; with caps on logits; windows; scaled logits; layers in a decoder of their own; shared keys, twice; states."""
OTHERS = [each for each in {**FAMILIES, **SHARING, **HYBRIDS} if each not in COMMON]


@cache
def expected(family: str, ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities (S - 1, V) after each token but the last, by transformers alone."""
    module = build(family)
    with torch.inference_mode(), throughout(module.dtype):
        logits_SV = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return logits_SV.double().log_softmax(dim=-1)


def require_scores(by_rank: list[list[list[PromptLogprobs]]], family: str, texts: list[list[int]]) -> None:
    for row, ids in enumerate(texts):
        found = PromptLogprobs.join([part for of_rank in by_rank for part in of_rank[row]] if by_rank else [])
        right = expected(family, tuple(ids))
        own = right.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        top, top_ids = right.topk(NUMBER)
        assert torch.tensor(found.top_ids).equal(top_ids)
        for ours, theirs in ((found.logprobs, own), (found.top_logprobs, top)):
            assert (torch.tensor(ours, dtype=torch.float64) - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", [*COMMON, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
@pytest.mark.parametrize("bounds", [(0, 61), (0, 40, 61), (0, 60, 61)], ids=str)
@pytest.mark.sampled(8)
def test_scores_are_those_of_transformers(rank_pools: RankPools, family: str, bounds: tuple[int, ...]) -> None:
    """Two prompts, the shorter one padded if it may be; chunks of any length, perhaps of one token."""
    texts = TEXTS if tasks.tiny_model(family).uneven_limit is None else [TEXTS[0], prompt(61, seed=1)]
    found = rank_pools.run(len(bounds) - 1, tasks.score, family, texts, bounds, PrefillOptions(), NUMBER)
    require_scores(found, family, texts)


@pytest.mark.parametrize(
    ("bounds", "options"),
    [
        ((0, 9, 9, 61), PrefillOptions()),
        ((0, 30, 45, 61), PrefillOptions(transfer=Transfer.direct)),
        ((0, 16, 61), PrefillOptions(name=PrefillName.tsp)),
        ((0, 30, 61), PrefillOptions(name=PrefillName.zigzag)),
        ((0, 61), PrefillOptions(name=PrefillName.single, chunk_tokens=16)),
    ],
    ids=["an empty chunk", "direct", "tsp", "zigzag", "pieces"],
)
def test_scores_of_every_prefill(rank_pools: RankPools, bounds: tuple[int, ...], options: PrefillOptions) -> None:
    found = rank_pools.run(len(bounds) - 1, tasks.score, "llama", TEXTS, bounds, options, NUMBER)
    require_scores([each for each in found if each], "llama", TEXTS)


def test_logits_of_few_tokens_are_in_memory_at_a_time() -> None:
    """Never those of a whole prompt: of both rows of a block, and of the forward the last token's alone."""
    made, logits = list[int](), Head.logits

    def counted(self: Head, hidden_BTD: Tensor) -> Tensor:
        found = logits(self, hidden_BTD)
        made.append(found.numel())
        return found

    most = 7 * len(TEXTS) * build("llama").config.vocab_size
    with mock.patch.object(Head, "logits", counted), mock.patch.object(scoring, "MOST_LOGITS", most):
        ranks = Ranks.start(RanksOptions(device=Device.cpu))
        found = tasks.score(ranks, "llama", TEXTS, (0, 61), PrefillOptions(), NUMBER)
    require_scores([found], "llama", TEXTS)
    assert len(made) == 9 and max(made) == most  # 60 tokens are scored, 7 at a time


def test_a_text_of_one_token_has_no_scores(rank_pools: RankPools) -> None:
    [[found]] = rank_pools.run(1, tasks.score, "llama", [[5]], (0, 1), PrefillOptions(), NUMBER)
    assert PromptLogprobs.join(found) == PromptLogprobs(first=1, logprobs=[], top_logprobs=[], top_ids=[])
