"""The formula against what PyTorch counts in a forward, and against the models' own dimensions."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from benchmarks.ttft.flops import layer_matrices, matmul_rate, prompt_flops
from runahead.model.model import Model
from tests.families import build, tiny_llama

C = 24


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama(num_hidden_layers=3, intermediate_size=48)).eval()


def test_the_formula_is_what_pytorch_counts() -> None:
    module = llama()
    formula = prompt_flops(Model(module), C)
    assert formula is not None
    reference = llama()
    reference.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(torch.arange(C)[None], logits_to_keep=1)
    counted = counter.get_total_flops()
    # Eager attention computes the masked half too: C keys per token rather than (C + 1) / 2 on average.
    dense = formula.attention * 2 * C // (C + 1)
    assert counted == formula.matmul + dense


def test_the_matrices_of_llama_are_those_of_its_config() -> None:
    D, N, K, H, F, L = 32, 4, 2, 8, 48, 3
    assert sum(i * o for i, o in layer_matrices(Model(llama()))) == L * (2 * D * N * H + 2 * D * K * H + 3 * D * F)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_other_families_too(family: str) -> None:
    """GPT-2 has matrices of another class, Mistral a sliding window of 16 tokens."""
    model = Model(build(family))
    formula = prompt_flops(model, C)
    assert formula is not None
    config = model.config
    seen = sum(min(token + 1, 16 if family == "mistral" else C) for token in range(C))
    per_pair = 2 * 2 * config.num_attention_heads * model.kv_shapes[0].key_dim
    assert formula.attention == config.num_hidden_layers * per_pair * seen
    assert formula.matmul > 2 * C * config.num_hidden_layers * 4 * config.hidden_size**2


def test_a_rate_is_measured() -> None:
    assert matmul_rate(Model(llama()), seconds=0.05) > 1e6
