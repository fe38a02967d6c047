"""The published form of LCKV models: a Llama whose config says whose keys and values each layer reads.

Facts of its config (whyNLP/LCKV, and whynlp/tinyllama-lckv-w2-100b, -w10-100b): `layer_types` is a string such as
"0_2_2_3", the layer that each one reads; `forward_passes` m and `backward_passes` b, of which a prompt takes m + b;
`force_nodiag`, by which no layer sees the token itself; `use_sequential`, by which tokens go one by one. Layers that
nobody reads have no weights for keys and values.
"""

# Legend: B batch, C new tokens, K kv heads, H head dim.

from __future__ import annotations

import re
import sys
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

MODEL_TYPE = "lckv-llama"


class LCKVConfig(LlamaConfig):
    """A Llama's config that says whose keys and values each layer reads, as `Reading` takes it.

    Raises:
        ValueError: `layer_types` is of another form.
    """

    model_type = MODEL_TYPE

    kv_sources: list[int] | None = None
    forward_passes: int = 7
    backward_passes: int = 2
    force_nodiag: bool = False

    def __post_init__(self, **others: Any) -> None:
        types = others.pop("layer_types", None)
        others.pop("sliding_window", None)  # of layers with an "s" alone
        if others.pop("use_sequential", False):
            self.forward_passes = sys.maxsize - self.backward_passes
        if isinstance(types, str):
            layers = types.split("_")
            if any(re.fullmatch(r"\d+", layer) is None for layer in layers):
                raise ValueError(f"layer_types {types[:60]!r} has windows or is no list of layers, such as 0_2_2_3")
            self.kv_sources = [int(layer) for layer in layers]
        elif self.kv_sources is None:
            self.kv_sources = list(range(self.num_hidden_layers))
        super().__post_init__(**others)


class Unread(nn.Module):
    """Stands for a projection to keys or values that nobody reads: zeros (B, C, K * H), in the memory of one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x_BCD: Tensor) -> Tensor:
        return x_BCD.new_zeros(1).expand(*x_BCD.shape[:-1], self.width)


class LCKVForCausalLM(LlamaForCausalLM):
    """A Llama without the weights for keys and values that nobody reads."""

    config_class = LCKVConfig

    def __init__(self, config: LCKVConfig) -> None:
        super().__init__(config)
        read = config.kv_sources or ()
        for number, layer in enumerate(self.model.layers):
            if number not in read:
                for name in ("k_proj", "v_proj"):
                    setattr(layer.self_attn, name, Unread(config.num_key_value_heads * config.head_dim))


def register() -> None:
    """Register the form with transformers. May be called again."""
    AutoConfig.register(MODEL_TYPE, LCKVConfig, exist_ok=True)
    AutoModelForCausalLM.register(LCKVConfig, LCKVForCausalLM, exist_ok=True)
