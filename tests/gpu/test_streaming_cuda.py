"""Chunks and re-encoded positions on a GPU: what the CPU says, of a text that is longer than the model."""

from __future__ import annotations

import pytest
import torch

from policies.streaming_llm import StreamingLLM
from runahead import Engine, GenerationOptions, PrefillOptions
from runahead.config import Positions
from runahead.thinning.rank_policies import RankPolicies
from tests.gpu.models import CPU, CUDA, NUM_LAYERS, alone, model


def test_a_stream_on_a_gpu_says_what_the_cpu_says() -> None:
    ids = torch.randint(211, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    policies = RankPolicies.everywhere([StreamingLLM(budget=40)], Positions.reencoded)
    outcomes = []
    for device in (CPU, CUDA):
        loaded, prefill = model(device, num_positions=96), PrefillOptions(chunk_tokens=32)
        engine = Engine(loaded, alone(device), prefill=prefill, policies=policies)
        batch = engine.generate([ids, ids[50:]], GenerationOptions(max_new_tokens=80, ignore_eos=True))
        outcomes.append([generation.first_token_logits_top5 for generation in batch.generations])
        assert batch.ranks[0].kept_tokens == [40] * NUM_LAYERS
        assert all(len(generation.new_token_ids) == 80 for generation in batch.generations)
    for ours, theirs in zip(*outcomes, strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), abs=1e-3)  # float32 on both
