"""The model of the GPU tests."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runahead import Model


def model(device: torch.device, dtype: torch.dtype = torch.float32, *, num_positions: int = 4096) -> Model:
    """Small, with two query heads per KV head; the same weights on every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
    )
    return Model(LlamaForCausalLM(config).to(device=device, dtype=dtype).eval())
