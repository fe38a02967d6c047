"""A differential fuzzer: families from their own defaults, on 1 to 3 ranks, against transformers alone.

A case that fails is repeated by its number:
    pytest "tests/differential/test_families.py::test_tokens_and_log_probabilities_are_those_of_transformers[17]"
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.families.small import CAUSAL_FAMILIES
from runahead import PrefillOptions
from tests.conftest import RankPools
from tests.differential import tasks
from tests.differential.cases import Case, case_of, family_of, right_families
from tests.families import throughout

NUM_CASES, NUM_SLOW_CASES = 120, 1500
TOLERANCE = 1e-6
"""Tolerance of log-probabilities in float64: some families round to float32 where `throughout` cannot see it."""

REFUSALS = (
    "cannot run at once",
    "rotary",
    "RoPE",
    "counts positions",
    "read the keys and values of other layers",
    "windows",
    "hold states",
    "does not support",
)
"""Words of errors by which a case may be refused; it is then computed by one chain, a row at a time."""


@pytest.mark.parametrize(
    "seed",
    [*range(NUM_CASES), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(NUM_CASES, NUM_SLOW_CASES))],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(rank_pools: RankPools, seed: int) -> None:
    case = case_of(seed)
    refused = require_equal(rank_pools, case)
    if refused is not None:
        assert any(words in refused for words in REFUSALS) and "\n" not in refused, refused
        for prompt in case.prompts:
            bounds = tuple(min(bound, len(prompt)) for bound in case.boundaries[:-1])
            alone = replace(case, prompts=[prompt], boundaries=(*bounds, len(prompt)), prefill=PrefillOptions())
            refused = require_equal(rank_pools, replace(alone, num_new=1))
            assert refused is None, refused


def test_cases_have_every_family_that_is_right() -> None:
    assert {family_of(seed) for seed in range(NUM_CASES)} == set(right_families()) < set(CAUSAL_FAMILIES)


def require_equal(rank_pools: RankPools, case: Case) -> str | None:
    """Compare all ranks' results of a case with transformers' own. Returns why the case is refused, if it is."""
    results = rank_pools.run(case.num_ranks, tasks.generate, case)
    assert len({type(result) for result in results}) == 1, results
    if isinstance(results[0], str):
        return results[0]
    for number, prompt in enumerate(case.prompts):
        # A new one for each, since some rotations of transformers remember the longest text.
        module = case.module(attention="sdpa" if case.model_type == "falcon" else "eager")
        ours = [result.generations[number] for result in results]
        assert all(each == ours[0] for each in ours)
        ids = list(prompt)
        for token, told in zip(ours[0].new_token_ids, ours[0].logprobs, strict=True):
            with torch.inference_mode(), throughout(torch.float64):
                logprobs_V = (
                    module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().log_softmax(0)
                )
            for known, value in [(token, told.logprob), *told.top]:
                assert abs(logprobs_V[known].item() - value) < TOLERANCE, (case, number, len(ids) - len(prompt))
            assert token == int(logprobs_V.argmax())
            ids.append(token)
    return None
