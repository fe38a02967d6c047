"""A real model and a real text: two ranks say what transformers says in one process, word for word."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runahead import (
    DecodeOptions,
    Engine,
    GenerationOptions,
    Model,
    ModelOptions,
    PrefillOptions,
    Ranks,
    from_ratios,
)
from runahead.config import DecodeName, Transfer
from runahead.model import loading
from tests.conftest import RankPools

TEXT = Path(__file__).resolve().parents[2] / "examples" / "frankenstein_letters.txt"
NEW_TOKENS = 32

TOLERANCE = 1e-4
"""Logits of this model in float32 spread over about 3; another order of summation was seen to cost 3e-5."""


@cache
def _model() -> Model:
    return Model.load(ModelOptions(), torch.device("cpu"))


def generate(ranks: Ranks, ids: list[int], ratios: list[float], transfer: Transfer) -> tuple[list[int], list[float]]:
    """Runs on every rank: new tokens, and the logits of the five likeliest first ones.

    After `direct` the ranks decode together, after `relay` the last one alone.
    """
    engine = Engine(
        _model(),
        ranks,
        prefill=PrefillOptions(transfer=transfer),
        partition=from_ratios(ratios),
        decode=DecodeOptions(name=DecodeName.sharded if transfer is Transfer.direct else DecodeName.last),
    )
    options = GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    generation = engine.generate([ids], options).generations[0]
    return generation.new_token_ids, [logit for _, logit in generation.first_token_logits_top5]


@pytest.fixture(scope="module", params=[500, *(pytest.param(n, marks=pytest.mark.slow) for n in (1_500, 3_100))])
def prompt(request: pytest.FixtureRequest) -> list[int]:
    """The beginning of the text, of so many tokens."""
    tokenizer = loading.load_tokenizer(ModelOptions())
    ids: list[int] = tokenizer(TEXT.read_text(encoding="utf-8")).input_ids[: request.param]
    assert len(ids) == request.param
    return ids


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """transformers' own tokens and first logits, from the same folder of weights."""
    folder = loading.load(ModelOptions(), device=torch.device("cpu"), attn_implementation="sdpa").path
    assert folder is not None and AutoTokenizer.from_pretrained(folder) is not None
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return output.sequences[0, len(prompt) :].tolist(), output.logits[0][0]


@pytest.mark.parametrize(
    ("ratios", "transfer"),
    [
        pytest.param([0.6, 0.4], Transfer.relay, id="two"),
        pytest.param([0.3, 0.3, 0.4], Transfer.direct, id="three", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_transformers(
    rank_pools: RankPools,
    prompt: list[int],
    expected: tuple[list[int], torch.Tensor],
    ratios: list[float],
    transfer: Transfer,
) -> None:
    expected_ids, first_logits = expected
    for new_ids, top5 in rank_pools.run(len(ratios), generate, prompt, ratios, transfer):
        assert new_ids == expected_ids
        assert torch.allclose(torch.tensor(top5), first_logits.topk(5).values, atol=TOLERANCE, rtol=0)
