"""The model of the GPU tests, its prompts, and what one GPU makes of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM, MistralForCausalLM

from runahead import Model, Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
"""The devices of most tests; the first GPU."""

MOST_TOKEN, NUM_LAYERS = 210, 4


def model(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    num_positions: int = 4096,
    window: int | None = None,
    **sizes: Any,
) -> Model:
    """Small, with two query heads per KV head; the same weights on every call. With a window it is a Mistral."""
    torch.manual_seed(0)
    kind = LlamaForCausalLM if window is None else MistralForCausalLM
    config = kind.config_class(
        **{
            "vocab_size": MOST_TOKEN + 1,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": num_positions,
        }
        | ({} if window is None else {"sliding_window": window})
        | sizes,
    )
    return Model(kind(config).to(device=device, dtype=dtype).eval())


def ids(num_tokens: int, seed: int = 3) -> list[int]:
    """Random tokens of a prompt."""
    return torch.randint(MOST_TOKEN + 1, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(device: torch.device = CUDA) -> Ranks:
    """The only rank of a job."""
    return Ranks(0, 1, device=device, backend="nccl" if device == CUDA else "gloo", timeout_s=60)
