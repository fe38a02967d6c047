"""Choosing tokens is what `transformers.generate` does with the same options."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from runahead.config import GenerationOptions
from runahead.decoding.sampling import Sampler, next_tokens, processors
from tests.families import VOCAB_SIZE, build, prompt

CPU = torch.device("cpu")
NUM_NEW = 10


@cache
def model() -> PreTrainedModel:
    module = build("llama")
    module.generation_config.eos_token_id = None
    return module


def generate(options: GenerationOptions, **settings: Any) -> Any:
    """With transformers: what it returns, with raw logits and processed scores."""
    ids_1S = torch.tensor([prompt(20)])
    torch.manual_seed(0)
    return model().generate(
        ids_1S,
        attention_mask=torch.ones_like(ids_1S),
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        do_sample=options.do_sample,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **settings,
    )


def logits_behind(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def next_token(sampler: Sampler, ids: list[int], logits_V: Tensor) -> int:
    [token] = next_tokens([sampler], [ids], logits_V[None])
    assert token is not None
    return token


@pytest.mark.parametrize("penalty", [1.0, 1.3, 5.0, 0.7])
def test_greedy_tokens_equal_generate(penalty: float) -> None:
    options = GenerationOptions(repetition_penalty=penalty)
    sampler, ids = Sampler(options, seed=0, device=CPU), prompt(20)
    for _ in range(NUM_NEW):
        ids.append(next_token(sampler, ids, logits_behind(ids)))
    assert ids[20:] == generate(options).sequences[0, 20:].tolist()


def test_repetition_penalty_changes_what_is_chosen() -> None:
    """Else the test above would pass without one."""
    plain, penalized = (generate(GenerationOptions(repetition_penalty=penalty)) for penalty in (1.0, 5.0))
    assert plain.sequences.tolist() != penalized.sequences.tolist()


SAMPLING = {
    "plain": GenerationOptions(do_sample=True),
    "temperature": GenerationOptions(do_sample=True, temperature=0.6),
    "top_k": GenerationOptions(do_sample=True, top_k=7),
    "top_k of all": GenerationOptions(do_sample=True, top_k=10 * VOCAB_SIZE),
    "top_p": GenerationOptions(do_sample=True, top_p=0.8),
    "tiny top_p": GenerationOptions(do_sample=True, top_p=1e-6),
    "all": GenerationOptions(do_sample=True, temperature=1.7, top_k=20, top_p=0.9, repetition_penalty=1.4),
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_scores_that_are_drawn_from_equal_generate(options: GenerationOptions) -> None:
    theirs, ours = generate(options), processors(options)
    for step in range(NUM_NEW):
        before = theirs.sequences[:, : 20 + step]
        scores = ours(before, theirs.logits[step]) if ours else theirs.logits[step]
        # the same float64 numbers through the same processors in the same order
        assert torch.equal(scores, theirs.scores[step])


def test_options_of_sampling_have_no_effect_on_greedy_choices() -> None:
    assert len(processors(GenerationOptions(temperature=0.1, top_k=3, top_p=0.5))) == 0


def test_tokens_are_drawn_as_often_as_their_scores_say() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    options = GenerationOptions(do_sample=True, temperature=2.0, top_k=3)
    num_draws = 4000
    sampler = Sampler(options, seed=0, device=CPU)
    drawn = torch.tensor([next_token(sampler, [4], logits) for _ in range(num_draws)]).bincount(minlength=5)
    expected = torch.softmax(torch.tensor([1.0, 0.5, 0.0]), dim=0)
    deviation = (expected * (1 - expected) / num_draws).sqrt()  # of a share, when it is right
    assert ((drawn[:3] / num_draws - expected).abs() < 4 * deviation).all()
    assert drawn[3:].sum() == 0


def test_seed_alone_decides_what_is_drawn() -> None:
    """Not the global generator, and not other rows."""
    options, logits = GenerationOptions(do_sample=True), torch.zeros(1000)

    def draws(seed: int) -> list[int]:
        torch.rand(7)
        sampler = Sampler(options, seed=seed, device=CPU)
        return [next_token(sampler, [0], logits) for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_logits_are_left_as_they_are() -> None:
    """The report shows the raw ones."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    next_token(Sampler(SAMPLING["all"], seed=0, device=CPU), [1, 2, 3], logits)
    assert torch.equal(logits, before)
