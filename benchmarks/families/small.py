"""Small models of any causal family of transformers: the family's own default config, with sizes that a test can have.

What makes a family, its kinds of layers, norms, rotations and experts, stays as its config class has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runahead.model.layer_kinds import decoder_config
from runahead.model.loading.hf import build_with_attention
from runahead.model.loading.quiet import quiet
from runahead.model.seam import ATTENTION_NAME, register

CAUSAL_FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Model types of all causal language models of the installed transformers."""

VOCABULARY = 97


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a small model. Windows are shorter than the text with which a model is checked when it is loaded.

    Attributes:
        layers: number of layers; of six each pattern of windows in the default configs has every kind of layer.
        heads: number of query heads.
        group: query heads per KV head, in families in which several share one.
        head_dim: width of a head.
        window: tokens of a sliding window or of a chunk.
        experts: number of experts, of which a token has two.
    """

    layers: int = 6
    heads: int = 4
    group: int = 2
    head_dim: int = 8
    window: int = 5
    experts: int = 4


def small_config(model_type: str, sizes: Sizes, **options: Any) -> PreTrainedConfig:
    """The default config of a family with these sizes.

    Args:
        options: of the text model; they come before all else.
    """
    kind = CONFIG_MAPPING[model_type]
    with quiet():
        default = kind()
        text = decoder_config(default)
        values = _small(default, sizes)
        options = {**_MISSING.get(model_type, {}), **options}
        inner = next((name for name in default.sub_configs if getattr(default, name) is text), None)
        if inner is None:
            values |= options
        else:
            values[inner] |= options
        return kind(**values)


def small_model(
    config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = ATTENTION_NAME
) -> PreTrainedModel:
    """A model of random weights, wide enough that a wrong mask or position shows in the logits."""
    register()
    # transformers' grouped kernels for experts know no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        module = build_with_attention(
            lambda name: AutoModelForCausalLM.from_config(config, attn_implementation=name, **experts), attention
        )
        torch.manual_seed(seed)  # again, since a build that failed has drawn numbers
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.2)
                elif "norm" not in name or not parameter.any():  # zeros would hide what they are multiplied with
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype).eval().requires_grad_(False)


_MISSING: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1, 3, 5]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 3,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 3,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 3,
        "attention_head_size": 8,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
}
"""Options without which transformers cannot build a family of its defaults, or not a small one."""

_RULES: tuple[tuple[str, str], ...] = (
    (r"(num_)?(hidden_|decoder_|encoder_|lstm_)?layers|n_layers?|num_(decoder|encoder)_layers|depth", "layers"),
    (r"(.*_)?attention_heads|n_heads?|num_heads", "heads"),
    (r"(.*_)?num_key_value_heads|kv_n_heads|num_kv_heads", "kv_heads"),
    (r"(.*_)?(v_)?head_dim|kv_channels|dim_head|d_kv|d_head", "head_dim"),
    (r"(attention_)?hidden_size|d_model|n_embd|dim|emb(ed)?_dim|embedding_size|word_embed_proj_dim", "width"),
    (r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|n_inner|d_inner|(expert_)?ffn_hidden_size", "inner"),
    (r".*lora_rank|.*lowrank|gated_norm_rank|laurel_rank|hidden_size_per_layer_input", "rank"),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", "experts"),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k", "chosen"),
    (r"sliding_window(_size)?|attention_chunk_size|local_attention(_window_len)?|window_size|floor_scale", "window"),
    (r".*vocab_size(_per_layer_input)?", "vocabulary"),
    (r"max_position_embeddings|n_positions|max_seq_len|seq_length", "positions"),
    (r"n_groups?|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers", "one"),
    (r"rotary_dim", "rotated"),
)
"""Names of options in configs, as a pattern, and the size that they have here."""


def _small(config: Any, sizes: Sizes) -> dict[str, Any]:
    """Arguments of a config class for a small config."""
    values, kept = config.to_dict(), dict[str, Any]()
    defaults = _class_defaults(type(config))
    width = sizes.heads * sizes.head_dim
    by_name = {
        "layers": sizes.layers,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "width": width,
        "inner": 2 * width,
        "rank": 8,
        "experts": sizes.experts,
        "chosen": 2,
        "window": sizes.window,
        "vocabulary": VOCABULARY,
        "positions": 256,
        "one": 1,
        "rotated": sizes.head_dim // 2,
    }
    heads = _first(values, "num_attention_heads", "n_heads", "n_head", "num_heads")
    for name, value in values.items():
        if name in config.sub_configs:
            if (sub := getattr(config, name)) is not None:
                kept[name] = _small(sub, sizes)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = next((each for pattern, each in _RULES if re.fullmatch(pattern, name)), None)
            if size == "kv_heads":
                kept[name] = sizes.heads if value == heads else 1 if value == 1 else sizes.heads // sizes.group
            elif size is not None and defaults.get(name, value) is not None:
                kept[name] = min(value, by_name[size]) if size == "positions" else by_name[size]
            elif re.fullmatch(r".*_token_(id|index)", name) and value >= VOCABULARY:
                kept[name] = VOCABULARY - 1
    return kept


def _class_defaults(kind: type) -> Mapping[str, Any]:
    """Defaults in the class, before its code derives some from others: None where it does."""
    fields: Mapping[str, Any] = getattr(kind, "__dataclass_fields__", {})
    return {name: each.default for name, each in fields.items()}


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)
