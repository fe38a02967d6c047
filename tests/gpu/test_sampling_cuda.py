"""Choosing tokens on a GPU: the host waits for nothing but the token, and the token is the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runahead import GenerationOptions
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.scored_tokens import ScoredToken
from runahead.ranks.accelerator import accelerator_for
from tests.gpu.models import CPU, CUDA

VOCAB_SIZE = 1000


class Even:
    """A constraint that allows even tokens, by bits that are on the host."""

    def allowed(self, device: torch.device) -> Tensor:
        packed = torch.full((VOCAB_SIZE // 8,), 0b01010101, dtype=torch.uint8).to(device, non_blocking=True)
        return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten().bool()

    def add(self, token: int) -> None:
        assert token % 2 == 0


OPTIONS = [
    GenerationOptions(),
    GenerationOptions(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
    GenerationOptions(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 4.0}),
    GenerationOptions(logprobs=5),
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_choosing_waits_for_nothing(options: GenerationOptions) -> None:
    device = CUDA
    gpu = accelerator_for(device)
    assert gpu is not None
    sampler = Sampler(options, 0, device, prompt=[1, 2, 3], constraint=Even())
    logits_V = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    sampler.add(int(sampler.choose(logits_V)))  # the first makes what later ones use
    with gpu.noting_waits() as waits:
        sampler.choose(logits_V)
        sampler.add(4)
    assert not waits


def test_greedy_tokens_and_their_log_probabilities_equal_the_cpus() -> None:
    logits_TV = 3 * torch.randn(20, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found = []
    for device in (CPU, CUDA):
        greedy = [each for each in OPTIONS if not each.do_sample]
        samplers = [Sampler(each, 0, device, prompt=[1, 2, 3]) for each in greedy]
        rows_TBV = logits_TV.to(device)[:, None].expand(-1, len(greedy), -1)
        found.append([next_tokens(samplers, logits_BV) for logits_BV in rows_TBV])
    assert found[0] == found[1]
    for ours, theirs in zip(*found, strict=True):
        assert isinstance(ours[-1], ScoredToken) and isinstance(theirs[-1], ScoredToken)
        assert ours[-1].logprobs.logprob == pytest.approx(theirs[-1].logprobs.logprob, abs=1e-4)
