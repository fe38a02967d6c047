"""Log-probabilities on live ranks are those of transformers' own logits, for rank 0 as they come and in the result."""

from __future__ import annotations

import pytest

from runahead import GenerationOptions
from runahead.config import DecodeName
from runahead.decoding.scored_tokens import ScoredToken
from tests.conftest import RankPools
from tests.families import oracle_logits, prompt
from tests.ranks import logprobs_tasks as tasks

PROMPTS = [prompt(40), prompt(23, seed=1), prompt(31, seed=2)]
OPTIONS = [
    GenerationOptions(max_new_tokens=5, ignore_eos=True, logprobs=3),
    GenerationOptions(max_new_tokens=7, ignore_eos=True),
    GenerationOptions(max_new_tokens=3, ignore_eos=True, logprobs=0, frequency_penalty=1.0, do_sample=True, seed=3),
]
TOLERANCE = 1e-9


@pytest.mark.parametrize(
    ("size", "decode"), [(1, DecodeName.last), (2, DecodeName.last), (3, DecodeName.sharded)], ids=str
)
def test_log_probabilities_equal_transformers_log_softmax(rank_pools: RankPools, size: int, decode: DecodeName) -> None:
    results = rank_pools.run(size, tasks.generate, PROMPTS, OPTIONS, decode)
    for batch, _ in results:
        assert batch.decode == decode.name
        assert batch.generations[1].logprobs is None
        for row, number in ((0, 3), (2, 0)):
            generation, ids = batch.generations[row], list(PROMPTS[row])
            assert generation.logprobs is not None
            assert len(generation.logprobs) == len(generation.new_token_ids) == OPTIONS[row].max_new_tokens
            for token, logprobs in zip(generation.new_token_ids, generation.logprobs, strict=True):
                expected_V = oracle_logits("llama", tuple(ids)).log_softmax(-1)
                assert logprobs.logprob == pytest.approx(expected_V[token].item(), abs=TOLERANCE)
                largest = expected_V.topk(number)
                assert [each for each, _ in logprobs.top] == largest.indices.tolist()
                assert [value for _, value in logprobs.top] == pytest.approx(largest.values.tolist(), abs=TOLERANCE)
                ids.append(token)
    (batch, steps), *others = results
    assert all(told == [] for _, told in others)
    for row, generation in enumerate(batch.generations):
        told = [step[row] for step in steps if step[row] is not None]
        assert told == generation.new_token_ids
        assert all(isinstance(token, ScoredToken) == (row != 1) for token in told)
        heard = [token.logprobs for token in told if isinstance(token, ScoredToken)]
        assert heard == (generation.logprobs or [])
