"""Choosing tokens is what `transformers.generate` does with the same options, and what OpenAI's API says of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from runahead.config import GenerationOptions
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.scored_tokens import ScoredToken
from tests.families import VOCAB_SIZE, build, prompt

CPU = torch.device("cpu")
NUM_NEW = 10


@cache
def model() -> PreTrainedModel:
    module = build("llama")
    module.generation_config.eos_token_id = None
    return module


def generate(options: GenerationOptions, **settings: Any) -> Any:
    """Generate with transformers: what it returns, with raw logits and processed scores."""
    ids_1S = torch.tensor([prompt(20)])
    torch.manual_seed(0)
    bias = {(token,): value for token, value in options.logit_bias.items()}
    return model().generate(
        ids_1S,
        attention_mask=torch.ones_like(ids_1S),
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        do_sample=options.do_sample,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p or None,
        repetition_penalty=options.repetition_penalty,
        sequence_bias=bias or None,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **settings,
    )


def logits_behind(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model()(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def next_token(sampler: Sampler, logits_V: Tensor) -> int:
    [token] = next_tokens([sampler], logits_V[None])
    assert token is not None
    return token


@pytest.mark.parametrize("penalty", [1.0, 1.3, 5.0, 0.7])
def test_greedy_tokens_equal_generate(penalty: float) -> None:
    options, ids = GenerationOptions(repetition_penalty=penalty), prompt(20)
    sampler = Sampler(options, seed=0, device=CPU, prompt=prompt(20))
    for _ in range(NUM_NEW):
        ids.append(next_token(sampler, logits_behind(ids)))
    assert ids[20:] == generate(options).sequences[0, 20:].tolist()


def test_repetition_penalty_changes_what_is_chosen() -> None:
    """The test above would pass without a penalty."""
    plain, penalized = (generate(GenerationOptions(repetition_penalty=penalty)) for penalty in (1.0, 5.0))
    assert plain.sequences.tolist() != penalized.sequences.tolist()


BIAS = {5: 4.0, 60: -100.0, 61: 2.5}
SAMPLING = {
    "plain": GenerationOptions(do_sample=True),
    "temperature": GenerationOptions(do_sample=True, temperature=0.6),
    "whole temperature": GenerationOptions(do_sample=True, temperature=2),
    "top_k": GenerationOptions(do_sample=True, top_k=7),
    "top_k of all": GenerationOptions(do_sample=True, top_k=10 * VOCAB_SIZE),
    "top_p": GenerationOptions(do_sample=True, top_p=0.8),
    "tiny top_p": GenerationOptions(do_sample=True, top_p=1e-6),
    "min_p": GenerationOptions(do_sample=True, min_p=0.1),
    "min_p of 1": GenerationOptions(do_sample=True, min_p=1.0),
    "logit_bias": GenerationOptions(do_sample=True, logit_bias=BIAS),
    "all": GenerationOptions(
        do_sample=True, temperature=1.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.4, logit_bias=BIAS
    ),
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_scores_that_are_drawn_from_equal_generate(options: GenerationOptions) -> None:
    if isinstance(options.temperature, int):
        theirs = generate(GenerationOptions(do_sample=True, temperature=float(options.temperature)))
    else:
        theirs = generate(options)
    ours = Sampler(options, seed=0, device=CPU, prompt=prompt(20))
    for step in range(NUM_NEW):
        scores_V = ours.scores(theirs.logits[step][0])
        # The same float64 numbers through the same steps in the same order; a bias is added elsewhere as float32.
        assert torch.equal(scores_V, theirs.scores[step][0])
        ours.add(int(theirs.sequences[0, 20 + step]))


def test_min_p_leaves_out_what_is_less_probable_than_a_share_of_the_most_probable() -> None:
    probabilities = torch.tensor([0.5, 0.26, 0.14, 0.1])
    sampler = Sampler(GenerationOptions(do_sample=True, min_p=0.25), seed=0, device=CPU)
    assert sampler.scores(probabilities.log()).isfinite().tolist() == [True, True, True, False]


def test_openais_penalties_count_new_tokens_and_not_the_prompts() -> None:
    options = GenerationOptions(presence_penalty=0.75, frequency_penalty=0.5)
    sampler = Sampler(options, seed=0, device=CPU, prompt=[1, 2, 3])
    logits = torch.zeros(5)
    assert sampler.scores(logits).tolist() == [0.0] * 5
    for token in (2, 4, 2):
        sampler.add(token)
    # mu[j] - count[j] * frequency - (count[j] > 0) * presence, as OpenAI's documentation has it
    assert sampler.scores(logits).tolist() == [0.0, 0.0, -1.75, 0.0, -1.25]


def test_each_penalty_works_without_the_other() -> None:
    for options, expected in (
        (GenerationOptions(presence_penalty=-2.0), 2.0),
        (GenerationOptions(frequency_penalty=1.5), -3.0),
    ):
        sampler = Sampler(options, seed=0, device=CPU)
        sampler.scores(torch.zeros(3))
        for _ in range(2):
            sampler.add(1)
        assert sampler.scores(torch.zeros(3)).tolist() == [0.0, expected, 0.0]


def test_a_bias_of_100_chooses_and_one_of_minus_100_bans() -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    best = int(logits.argmax())
    assert next_token(Sampler(GenerationOptions(logit_bias={7: 100.0}), 0, CPU), logits) == 7
    assert (
        next_token(Sampler(GenerationOptions(logit_bias={best: -100.0}), 0, CPU), logits) == logits.topk(2).indices[1]
    )


def test_options_of_sampling_have_no_effect_on_greedy_choices() -> None:
    sampler = Sampler(GenerationOptions(temperature=0.1, top_k=3, top_p=0.5, min_p=0.9), seed=0, device=CPU)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    assert sampler.takes_largest
    assert torch.equal(sampler.scores(logits), logits)


def test_tokens_are_drawn_as_often_as_their_scores_say() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    options = GenerationOptions(do_sample=True, temperature=2.0, top_k=3)
    num_draws = 4000
    sampler = Sampler(options, seed=0, device=CPU)
    drawn = torch.tensor([next_token(sampler, logits) for _ in range(num_draws)]).bincount(minlength=5)
    expected = torch.softmax(torch.tensor([1.0, 0.5, 0.0]), dim=0)
    deviation = (expected * (1 - expected) / num_draws).sqrt()  # of a share, when it is right
    assert ((drawn[:3] / num_draws - expected).abs() < 4 * deviation).all()
    assert drawn[3:].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawing_equals_torchs_own(dtype: torch.dtype) -> None:
    sampler = Sampler(GenerationOptions(do_sample=True, top_k=50), seed=4, device=CPU)
    logits_TV = torch.randn(100, VOCAB_SIZE, dtype=dtype, generator=torch.Generator().manual_seed(0))
    theirs = torch.Generator().manual_seed(4)
    for logits_V in logits_TV:
        probabilities_V = sampler.scores(logits_V).softmax(-1)
        assert next_token(sampler, logits_V) == torch.multinomial(probabilities_V, 1, generator=theirs).item()


def test_seed_alone_decides_what_is_drawn() -> None:
    """The global generator and other rows have no effect."""
    options, logits = GenerationOptions(do_sample=True), torch.zeros(1000)

    def draws(seed: int) -> list[int]:
        torch.rand(7)
        sampler = Sampler(options, seed=seed, device=CPU)
        return [next_token(sampler, logits) for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


MIXED = [
    GenerationOptions(),
    GenerationOptions(do_sample=True, top_k=30),
    GenerationOptions(do_sample=True, frequency_penalty=1.0, min_p=0.01),
    GenerationOptions(repetition_penalty=1.5, presence_penalty=0.5, logprobs=2),
    GenerationOptions(do_sample=True, temperature=1.5, logit_bias={4: 3.0}, logprobs=0),
]


def test_rows_that_come_and_go_get_the_tokens_that_they_get_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RTV = torch.randn(len(MIXED), 12, VOCAB_SIZE, generator=generator)

    def made() -> list[Sampler]:
        return [Sampler(each, seed=row, device=CPU, prompt=[row]) for row, each in enumerate(MIXED)]

    alone = [
        [next_token(sampler, logits_V) for logits_V in row] for sampler, row in zip(made(), logits_RTV, strict=True)
    ]
    samplers, got = made(), [list[int]() for _ in MIXED]
    for step in range(40):
        rows = [row for row in range(len(MIXED)) if (step + row) % 3 != 0 and len(got[row]) < 12]
        if not rows:
            continue
        rows.reverse()
        logits_BV = torch.stack([logits_RTV[row, len(got[row])] for row in rows])
        ended = step % 2 == 0  # a row beside them has ended
        given = [samplers[row] for row in rows] + [None] * ended
        tokens = next_tokens(given, torch.cat([logits_BV, torch.full((int(ended), VOCAB_SIZE), torch.nan)]))
        assert not ended or tokens.pop() is None
        for row, token in zip(rows, tokens, strict=True):
            assert token is not None
            got[row].append(token)
    assert got == alone


class Allowed:
    """A constraint that allows 5 after anything but 5, and then 6."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def allowed(self, device: torch.device) -> Tensor:
        allowed_V = torch.zeros(VOCAB_SIZE, dtype=torch.bool, device=device)
        allowed_V[6 if self.came[-1:] == [5] else 5] = True
        return allowed_V

    def add(self, token: int) -> None:
        self.came.append(token)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_constraint_decides_and_hears_of_the_tokens_that_came(do_sample: bool) -> None:
    constraint = Allowed()
    options = GenerationOptions(
        do_sample=do_sample, top_p=0.9, repetition_penalty=2.0, logit_bias={9: 100.0}, logprobs=1
    )
    sampler = Sampler(options, seed=0, device=CPU, constraint=constraint)
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tokens = [next_token(sampler, logits) for _ in range(4)]
    assert tokens == constraint.came == [5, 6, 5, 6]
    assert isinstance(tokens[0], ScoredToken)
    assert tokens[0].logprobs.logprob == pytest.approx(float(logits.log_softmax(0)[5])), "of the model, unconstrained"


def test_log_probabilities_are_those_of_the_logits_before_any_step() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(4, VOCAB_SIZE, generator=generator)
    logits_BV[3, 4:] = -torch.inf
    options = [
        GenerationOptions(logprobs=3),
        GenerationOptions(),
        GenerationOptions(logprobs=0, do_sample=True, temperature=0.3, presence_penalty=1.0, logit_bias={8: 9.0}),
        GenerationOptions(logprobs=5),
    ]
    samplers: list[Sampler | None] = [Sampler(each, seed=1, device=CPU) for each in options]
    tokens = next_tokens([*samplers, None], torch.cat([logits_BV, logits_BV[:1]]))
    assert type(tokens[1]) is int and tokens[4] is None
    for row, number in ((0, 3), (2, 0), (3, 5)):
        token, expected_V = tokens[row], logits_BV[row].log_softmax(0)
        assert isinstance(token, ScoredToken)
        assert token.logprobs.logprob == pytest.approx(float(expected_V[int(token)]), abs=1e-6)
        largest = expected_V.topk(number)
        assert [value for _, value in token.logprobs.top] == pytest.approx(
            [max(value, -9999.0) for value in largest.values.tolist()], abs=1e-6
        )
        assert [each for each, _ in token.logprobs.top][:4] == largest.indices.tolist()[:4]
    assert isinstance(tokens[3], ScoredToken)
    assert tokens[3].logprobs.top[-1][1] == -9999.0, "minus infinity is no number in JSON"


def test_logits_are_left_as_they_are() -> None:
    """The report shows the raw ones."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    for options in (SAMPLING["all"], MIXED[2], MIXED[3]):
        sampler = Sampler(options, seed=0, device=CPU, prompt=[1, 2, 3])
        for _ in range(2):
            next_token(sampler, logits)
    assert torch.equal(logits, before)


def test_a_row_may_begin_inside_a_forward_and_go_on_outside() -> None:
    """A forward is in inference mode, whose tensors cannot be changed elsewhere."""
    options, logits = GenerationOptions(repetition_penalty=1.5, frequency_penalty=1.0), torch.zeros(VOCAB_SIZE)
    sampler = Sampler(options, seed=0, device=CPU, prompt=[3])
    with torch.inference_mode():
        first = next_token(sampler, logits)
    assert next_token(sampler, logits) != first
