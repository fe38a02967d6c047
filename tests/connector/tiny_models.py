"""Tiny random models of five families as checkpoints, and their keys and values by transformers in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runahead_vllm.checkpoint import digest
from tests.connector.written import KEY, SALT

WINDOW = 96
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3")


def save(family: str, folder: Path, kv_heads: int = 6) -> Path:
    """A checkpoint of six layers, random weights, no tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, kv_heads), dtype=torch.float32)
    if family.startswith("gemma"):  # with a tied head the last token would win whatever the layers say
        model.get_input_embeddings().weight.data *= 0.1
    model.save_pretrained(folder)
    return folder


def config(family: str, kv_heads: int = 6) -> Any:
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": 576,  # ranks of vLLM share it: a multiple of 64 and of their number
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "tie_word_embeddings": family.startswith("gemma"),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    gemma = sizes | {"initializer_range": 0.2, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}
    match family:
        case "llama":
            return LlamaConfig(**sizes)
        case "mistral":
            return MistralConfig(**sizes, sliding_window=WINDOW)
        case "qwen3":
            return Qwen3Config(**sizes)
        case "gemma2":
            return Gemma2Config(**gemma)
        case _:
            kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
            return Gemma3TextConfig(**gemma, layer_types=kinds, use_bidirectional_attention=False)


class Computed:
    """A checkpoint's keys and values, by the model's own code with eager attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval()

    @torch.inference_mode()
    def layers(self, ids: list[int]) -> list[Tensor]:
        """All tokens of all layers, those of sliding windows, too."""
        from transformers import DynamicCache

        cache = DynamicCache()  # without the config: layers keep what is out of their windows
        self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        return [torch.cat([layer.keys, layer.values], -1)[0].transpose(0, 1) for layer in cache.layers]

    def about(self, folder: Path) -> dict[str, Any]:
        """The answer to GET /v1/prefill of a server that writes to a folder."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None)
        if config.model_type == "mistral":
            kinds = ["sliding_attention"] * config.num_hidden_layers
        dims = config.head_dim
        return {
            "object": "prefill_server",
            "format": "runahead segment 1",
            "folder": str(folder),
            "host": "here",
            "max_model_len": config.max_position_embeddings,
            "key": KEY,
            "salt": SALT,
            "checkpoint": digest(self.folder),
            "why_no_checkpoint": "",
            "dtype": "float32",
            "vocab_size": config.vocab_size,
            "model_type": config.model_type,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "rope": json.loads(json.dumps(config.rope_parameters, default=str)),
            "layers": [
                {
                    "kv_heads": config.num_key_value_heads,
                    "key_dim": dims,
                    "value_dim": dims,
                    "window": window if kind == "sliding_attention" else None,
                }
                for kind in kinds
            ],
        }
