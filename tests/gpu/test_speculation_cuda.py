"""Speculation on a GPU: plain steps are a graph, drafts are verified without one, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from policies.quest import Quest
from runahead import Engine, GenerationOptions
from runahead.config import Speculate
from runahead.decoding.speculative.speculator import Draft
from runahead.thinning.rank_policies import RankPolicies
from tests.gpu.models import CUDA, alone, model


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_on_a_gpu_are_those_without_speculation(num_rows: int, do_sample: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(211, (20 + 7 * row,), generator=generator).tolist() * 2 for row in range(num_rows)]
    engine = Engine(model(CUDA), alone())
    plain = GenerationOptions(max_new_tokens=24, ignore_eos=True, do_sample=do_sample, temperature=0.5)
    expected = [each.new_token_ids for each in engine.generate(prompts, plain).generations]
    for always in (False, True):
        drafted = replace(plain, speculate=Speculate.lookup, speculate_match=1, speculate_always=always)
        batch = engine.generate(prompts, drafted)
        assert [each.new_token_ids for each in batch.generations] == expected
        report = batch.ranks[0].speculation
        assert report is not None and (report.verifications > 0 or not always)


@pytest.mark.parametrize("first", [None, "lookup"])
def test_drafts_over_what_is_retrieved_change_no_token(first: Literal["lookup"] | None) -> None:
    """The index and the chosen tokens are on the GPU, beside the keys and values that verify."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(211, (60 + 14 * row,), generator=generator).tolist() * 2 for row in range(2)]
    draft = Draft(by=RankPolicies.everywhere([Quest(fetch=0.2, min_tokens=0)]), first=first)
    engine = Engine(model(CUDA), alone(), draft=draft)
    plain = GenerationOptions(max_new_tokens=20, ignore_eos=True)
    expected = [each.new_token_ids for each in engine.generate(prompts, plain).generations]
    batch = engine.generate(prompts, replace(plain, speculate=Speculate.policy, speculate_always=True))
    assert [each.new_token_ids for each in batch.generations] == expected
    report = batch.ranks[0].speculation
    assert report is not None and report.accepted > 0
