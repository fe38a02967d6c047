"""A model whose weights hold a NaN is refused: when it is loaded, or at the first token that it makes."""

from __future__ import annotations

import pytest
import torch

from runahead import Engine, GenerationOptions, Model, Ranks, RanksOptions
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.model.checks.logits_check import require_numbers
from tests.families import build


def test_the_spoilt_weight_is_named() -> None:
    module = build("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
    with pytest.raises(ValueError, match="not numbers: its weight model.layers.1.mlp.up_proj.weight holds .*download"):
        Model(module)


def test_weights_that_overflow_are_told_from_spoilt_ones() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="its weights are finite, so a layer overflows; use model.dtype=float32"):
        require_numbers(torch.tensor([[torch.inf, 0.0]]), module, "tiny")


def test_tokens_that_a_model_rules_out_are_numbers() -> None:
    require_numbers(torch.tensor([[-torch.inf, 0.0]]), torch.nn.Linear(2, 2), "tiny")


def test_a_token_that_only_the_prompt_has_is_noticed_before_anything_is_said() -> None:
    module = build("llama")
    rare = 50
    with torch.no_grad():
        module.get_input_embeddings().weight[rare] = torch.nan
    model = Model(module)  # its check does not see that token
    with Ranks.start(RanksOptions()) as ranks:
        engine = Engine(model, ranks)
        assert engine.generate([[3, 4, 5]], GenerationOptions(max_new_tokens=1)).generations
        with pytest.raises(ValueError, match="logits are not numbers, so there is no next token"):
            engine.generate([[3, rare, 5]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("do_sample", [False, True])
def test_no_token_comes_of_what_is_no_number(bad: float, do_sample: bool) -> None:
    sampler = Sampler(GenerationOptions(do_sample=do_sample), 0, torch.device("cpu"))
    assert next_tokens([sampler], torch.tensor([[0.0, bad, 1.0]])) == [None]
    ended: list[Sampler | None] = [None, sampler]
    rows_BV = torch.tensor([[0.0, bad, 1.0], [0.0, -torch.inf, -torch.inf]])
    assert next_tokens(ended, rows_BV) == [None, 0], "a row that has ended is not asked"


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_row_without_numbers_need_not_be_an_error_of_the_others(do_sample: bool) -> None:
    options = GenerationOptions(do_sample=do_sample, logprobs=1)
    samplers = [Sampler(options, 0, torch.device("cpu")) for _ in range(3)]
    logits_BV = torch.zeros(3, 8)
    logits_BV[[0, 2], 5], logits_BV[1, 2] = 1e4, torch.nan
    assert next_tokens(samplers, logits_BV) == [5, None, 5]
