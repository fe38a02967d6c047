"""Chunks and re-encoded positions on a GPU: what the CPU says, of a text that is longer than the model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from policies import StreamingLLM
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.config import Positions
from runahead.rank_policies import RankPolicies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model(device: torch.device) -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return Model(LlamaForCausalLM(config).to(device).eval())


def test_a_stream_on_a_gpu_says_what_the_cpu_says() -> None:
    ids = torch.randint(211, (1500,), generator=torch.Generator().manual_seed(2)).tolist()
    policies = RankPolicies.everywhere([StreamingLLM(budget=100)], Positions.reencoded)
    outcomes = []
    for device, backend in ((torch.device("cpu"), "gloo"), (torch.device("cuda", 0), "nccl")):
        ranks = Ranks(0, 1, device=device, backend=backend, timeout_s=20)
        engine = Engine(model(device), ranks, prefill=PrefillOptions(chunk_tokens=64), policies=policies)
        batch = engine.generate([ids, ids[200:]], GenerationOptions(max_new_tokens=300, ignore_eos=True))
        outcomes.append([generation.first_token_logits_top5 for generation in batch.generations])
        assert batch.ranks[0].kept_tokens == [100] * 6
        assert all(len(generation.new_token_ids) == 300 for generation in batch.generations)
    for ours, theirs in zip(*outcomes, strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), abs=1e-3)  # float32 on both
